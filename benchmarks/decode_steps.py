"""Decoding steps without an engine, and stacks of random adapters for them.

An engine's time includes the host's part and depends on its schedule. Here a plan is made once, and
each call reads and writes the same places, so all calls do the same work.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax import params as params_lib
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack, Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout.device import DecodePlan, Drawn
from mint_jax.rollout.pages import pages_for
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import CachedPrompt, Row, SampleState, longest_table


class Steps:
    """Rows with pages of their own on one device, which draw greedily; ``room`` is positions of a
    row.
    """

    def __init__(self, base: Base, rows: int, room: int, seed: int):
        self.base, self.rows, self.room = base, rows, room
        self._each = pages_for(room, PAGE)
        self._table = longest_table(base.cfg.context)
        self._first = np.random.default_rng(seed).integers(3, base.cfg.vocab_size, rows).tolist()
        self.pool: Any = device.empty_pool(base.cfg, base.mesh, rows * self._each, base.dtype)

    def plan(
        self,
        slots: Sequence[Slot | None],
        stacks: Stacks,
        cached: int = 0,
        alone: int | None = None,
    ) -> DecodePlan:
        """Rows that decode, and their arguments.

        Args:
            slots: of each row; None is the bare base.
            cached: positions before each row's token.
            alone: the only row that decodes; None for all of them.
        """
        live: list[Row] = []
        for r, slot in enumerate(slots):
            request = Request((self._first[r],), slot, max_tokens=self.room, temperature=0.0)
            pages = list(range(r * self._each, (r + 1) * self._each))
            prompt, tokens = CachedPrompt(request, ("bench", None)), [self._first[r]] * cached
            live.append(Row(SampleState(prompt, 0, r, pages=pages, tokens=tokens), self.room))
        shape = self.rows, 1, self._table, self.base.cfg.vocab_size, stacks
        plan, places = plans.rows_plan(live, *shape)
        if places != list(range(len(slots))):
            raise RuntimeError("samples stand in rows of their order")
        if alone is not None:
            chosen = np.arange(self.rows) == alone
            plan = jax.tree.map(
                lambda x, y: np.where(chosen.reshape(-1, *(1,) * (x.ndim - 1)), x, y),
                plan,
                plans.rows_plan([], *shape)[0],
            )
        return plan

    def take(self, stacks: Stacks, plan: DecodePlan, steps: int) -> Drawn:
        """Takes steps, at most ``device.STEPS``; done when it returns."""
        with jax.set_mesh(self.base.mesh):
            self.pool, drawn = device.decode(
                self.base.params, stacks, self.pool, plan, np.int32(steps), cfg=self.base.cfg
            )
            return jax.block_until_ready(drawn)


def random_stack(base: Base, adapter: AdapterConfig, slots: int, seed: int) -> AdapterStack:
    """A stack whose slots all hold adapters, each another, with factors that change what is
    drawn.
    """
    specs = lora_tree.stack_specs(
        transformer.abstract(base.cfg), adapter.targets, adapter.bucket, slots
    )

    def draw(path: str, spec: Any) -> jax.Array:
        spread = spec.shape[-1] ** -0.5 if path.endswith("/a") else 0.02
        return spread * jax.random.normal(
            jax.random.fold_in(jax.random.key(seed), params_lib.path_seed(path)), spec.shape
        )

    make = jax.jit(lambda: params_lib.map_with_path(draw, specs))
    return AdapterStack(make(), jnp.full((slots,), adapter.scale), adapter.bucket)


def adapter_bytes(base: Base, adapter: AdapterConfig) -> int:
    """Bytes of one adapter's factors."""
    return lora_tree.adapter_nbytes(transformer.abstract(base.cfg), adapter)
