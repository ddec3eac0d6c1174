"""The programs of an engine, for compiling ahead of the first request."""

import functools
from typing import Any

import jax
import numpy as np

from mint_jax.compiling import Program, abstract
from mint_jax.lora.tree import Stacks
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout.active import ActiveRequests


def programs(active: ActiveRequests, stacks: Stacks) -> list[Program]:
    """Returns every program that an engine over these stacks runs."""
    base = active.base
    cfg, params, shapes, calls = base.cfg, base.params, abstract(stacks), active.calls
    pool = device.abstract_pool(cfg, base.mesh, *calls.sizes(calls.most))

    def lowered(function: Any, *args: Any) -> None:
        with jax.set_mesh(base.mesh):
            function.lower(*args, cfg=cfg).compile()

    def prefill(score: bool = False) -> None:
        plan = plans.blocks_plan(
            [[]] * active.parts, active.blocks, active.table, stacks, score, calls.kinds
        )
        lowered(device.prefill, params, shapes, pool, plan)

    def decode(rows: int) -> None:
        sizes = rows, active.parts, active.table, cfg.vocab_size
        plan, _ = plans.rows_plan([], *sizes, stacks, calls.kinds)
        lowered(device.decode, params, shapes, pool, plan, np.int32(0))

    def pages() -> None:
        ids = calls.nowhere()
        paged = {kind: device.part_of(pool, cfg, kind) for kind in calls.kinds}
        for part in paged.values():
            lowered(device.read_pages, part, ids)
            with jax.set_mesh(base.mesh):
                contents = jax.eval_shape(functools.partial(device.read_pages, cfg=cfg), part, ids)
            contents = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), contents)
            lowered(device.write_pages, part, ids, contents)
        if active.keep_routes:
            lowered(device.read_pages, pool["routes"], ids)
        if active.reuse_decoded:
            for kind in {"pages", "near"} & paged.keys():
                lowered(device.move_pages, paged[kind], device.PageMoves(*[ids] * 5))

    out = [Program("prefill", f"prefill of {active.blocks * PAGE} tokens", prefill, 0)]
    for r in active.rows:
        build, urgency = functools.partial(decode, r), int(r != active.rows[0])
        out.append(Program(("decode", r), f"decoding of {r} rows", build, urgency))
    out.append(Program("pages", "pages to and from the host", pages, 0))
    out.append(Program("scores", "scores of a prompt", functools.partial(prefill, True), 2))
    return out
