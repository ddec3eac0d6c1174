"""Programs of a trainer with declared slots and shapes, to be compiled before they are needed."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from mint_jax.compiling import Program, abstract
from mint_jax.train import blocks as blocks_lib
from mint_jax.train import state as state_lib
from mint_jax.train import step as step_lib
from mint_jax.train.config import OPTIMIZERS, BlockShape
from mint_jax.train.losses import stack_coefs
from mint_jax.train.state import stack_hyper
from mint_jax.train.trainer import Trainer


def warm(trainer: Trainer) -> None:
    """Compiles every program, so that no request waits for a compilation."""
    for program in programs(trainer):
        program.build()


def programs(trainer: Trainer) -> list[Program]:
    """Returns every program: updates of each rank, steps with and without a backward pass; if the
    base has experts, also steps that replay them.
    """
    out = []
    smallest = next(shape for shape in trainer.declared if shape.width == 1)
    for bucket in trainer.capacity:
        stack = abstract(trainer.state[bucket])
        for kind in OPTIMIZERS:
            build = functools.partial(_compile_update, trainer, bucket, stack, kind)
            name, urgency = f"update, {kind}, rank {bucket}", 0 if kind == "adamw" else 2
            out.append(Program(("update", bucket, kind), name, build, urgency))
        for routed in (False, True) if trainer.base.cfg.routed else (False,):
            for backward in (True, False):
                for shape in trainer.declared:
                    what = "forward and backward" if backward else "forward"
                    sizes = f"{shape.blocks} x {shape.rows} rows of {shape.tokens}"
                    wide = f", {shape.width} targets a position" if shape.width > 1 else ""
                    also = wide + (", with routes" if routed else "")
                    is_first = backward and shape == smallest
                    urgency = 2 if shape.width > 1 or routed else 0 if is_first else 1
                    build = functools.partial(
                        _compile_step, trainer, bucket, stack, shape, backward, routed
                    )
                    key = "step", bucket, shape, backward, routed
                    name = f"{what}, rank {bucket}, {sizes}{also}"
                    out.append(Program(key, name, build, urgency))
    return out


def _compile_update(trainer: Trainer, bucket: int, stack: Any, kind: str) -> None:
    count = trainer.capacity[bucket]
    slots, hyper = np.full(count, count, np.int32), stack_hyper([], count)
    with jax.set_mesh(trainer.base.mesh):
        args = {bucket: stack}, {bucket: slots}, {bucket: hyper}
        step_lib.optim_step.lower(*args, kind).compile()
        state_lib.read_slot.lower(stack, np.int32(0)).compile()
        one = jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype),
            jax.eval_shape(state_lib.slot_of, stack, np.int32(0)),
        )
        state_lib.write_slot.lower(stack, np.int32(0), one, cfg=trainer.base.cfg).compile()


def _compile_step(
    trainer: Trainer, bucket: int, stack: Any, shape: BlockShape, backward: bool, routed: bool
) -> None:
    cfg, params = trainer.base.cfg, trainer.base.params
    batch, _ = blocks_lib.fill([], shape)
    if routed:
        assert cfg.experts is not None
        layers = sum(cfg.stacks[stack] for stack in cfg.routed_layers)
        routes = np.full((layers, *shape[:3], cfg.experts.per_token), -1, np.int16)
        batch = dataclasses.replace(batch, routes=routes)
    coefs = stack_coefs([], shape.blocks)
    slots = {bucket: np.full(shape.blocks, trainer.capacity[bucket], np.int32)}
    with jax.set_mesh(trainer.base.mesh):
        if backward:
            # a default that is left out would be another program than ``Trainer`` calls
            static: dict[str, Any] = {"cfg": cfg, "remat": trainer.remat, "custom": ()}
            static["entropy_gradient"] = False
            args = params, {bucket: stack}, batch, coefs, slots
            step_lib.forward_backward.lower(*args, **static).compile()
        else:
            adapters = {bucket: stack.adapters}
            step_lib.score.lower(params, batch, coefs, adapters, slots, cfg=cfg).compile()
