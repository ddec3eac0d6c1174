"""Frozen adapters that KL terms and DPO compare with; a policy without one has the bare base."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.train import blocks as blocks_lib
from mint_jax.train import step as step_lib
from mint_jax.train.blocks import DatumBlock, Fitted
from mint_jax.train.config import PolicyConfig
from mint_jax.train.losses import stack_coefs


class References:
    """Reference adapters by policy, resident from their first use."""

    def __init__(self, base: Base, policies: Mapping[str, PolicyConfig]):
        self._base, self._policies = base, policies
        self._adapters: dict[str, tuple[AdapterConfig, Any]] = {}
        self._resident: tuple[Stacks, dict[str, Slot]] | None = None

    def put(self, name: str, config: AdapterConfig, adapter: Any) -> None:
        """Sets a policy's reference. Raises ``UserError`` for weights that do not fit."""
        specs = transformer.abstract(self._base.cfg)
        lora_tree.check_fits(adapter, config, specs, f"reference of policy {name!r}")
        self._adapters[name] = config, adapter
        self._resident = None

    def get(self, name: str) -> tuple[AdapterConfig, Any] | None:
        """Returns a policy's frozen adapter; None for the bare base."""
        return self._adapters.get(name)

    def forget(self, name: str) -> None:
        if self._adapters.pop(name, None) is not None:
            self._resident = None

    def resident(self) -> tuple[Stacks, dict[str, Slot]]:
        """Returns all references' stacks, and the slots by policy. Raises ``UserError`` if a loss
        names a revision whose adapter ``put`` was not given.
        """
        for name, policy in self._policies.items():
            loss = policy.loss
            is_named = loss.needs_reference and loss.reference not in ("start", "base")
            if is_named and name not in self._adapters:
                raise UserError(
                    f"policy {name!r}: its loss refers to {loss.reference!r}, whose adapter was"
                    " not given: call refer()"
                )
        if self._resident is None:
            specs = transformer.abstract(self._base.cfg)
            stacks, slots = lora_tree.stack_adapters(specs, self._adapters)
            self._resident = multihost.replicate(stacks, self._base.mesh), slots
        return self._resident

    def score(self, blocks: Sequence[DatumBlock], fitted: Fitted) -> None:
        """Computes the missing ``ref_logp`` of these blocks' data."""
        if not blocks:
            return
        stacks, at = self.resident()
        adapted = [block for block in blocks if block.work.policy in at]
        adapted.sort(key=lambda block: at[block.work.policy])
        numbers: dict[int, list[int]] = {}
        for block in adapted:
            slot = at[block.work.policy]
            numbers.setdefault(slot.bucket, []).append(slot.index)
        order = adapted + [block for block in blocks if block.work.policy not in at]
        # The shape of the training pass, so that varying lengths compile nothing more.
        shape = fitted.shape._replace(blocks=len(order))
        batch, spans = blocks_lib.fill(order, *fitted._replace(shape=shape))
        with jax.set_mesh(self._base.mesh):
            logp, _ = step_lib.score(
                self._base.params,
                batch,
                stack_coefs([], len(order)),
                {bucket: stacks[bucket] for bucket in numbers},
                {bucket: np.array(own, np.int32) for bucket, own in numbers.items()},
                cfg=self._base.cfg,
            )
            logp = multihost.to_host(logp)
        for work, i, block, row, start in spans:
            ref = work.data[i].ref_logp
            assert ref is not None
            own = logp[block, row, start : start + len(ref)]
            np.copyto(ref, own, where=np.isnan(ref))
