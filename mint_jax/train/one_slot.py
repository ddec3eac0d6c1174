"""One policy's training state between its slot of a stack and the host: read, write, and conversion
to and from ``Held``.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from mint_jax import params as params_lib
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig
from mint_jax.train import state as state_lib
from mint_jax.train.held import PARTS, Held
from mint_jax.train.state import TrainStack


class OneSlot(NamedTuple):
    """A slot's leaves without their slot axis."""

    factors: Any
    mu: Any
    nu: Any
    grad: Any
    scale: Any
    count: Any
    steps: Any
    skipped: Any


def in_bucket(stack: TrainStack, slot: jax.Array) -> OneSlot:
    """The leaves of one slot; ``read`` is the compiled form."""
    of = functools.partial(
        jax.tree.map,
        lambda x: jax.lax.dynamic_index_in_dim(x, slot, state_lib.slot_axis(x), keepdims=False),
    )
    opt = {name: optax.tree.get(stack.opt, name) for name in ("mu", "nu", "count")}
    return OneSlot(
        of(stack.adapters.factors), of(opt["mu"]), of(opt["nu"]), of(stack.grad_sum),
        of(stack.adapters.scale), of(opt["count"]), of(stack.steps), of(stack.skipped),
    )  # fmt: skip


read = jax.jit(in_bucket)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("stack",))
def write(stack: TrainStack, slot: jax.Array, one: OneSlot, cfg: ModelConfig) -> TrainStack:
    """The stack with one slot replaced; the policy's optimizer settings in ``stack.hyper`` stay."""

    def put(all_: Any, mine: Any) -> Any:
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_index_in_dim(
                x, y.astype(x.dtype), slot, state_lib.slot_axis(x)
            ),
            all_,
            mine,
        )

    opt = {
        name: put(optax.tree.get(stack.opt, name), getattr(one, name))
        for name in ("mu", "nu", "count")
    }
    new = dataclasses.replace(
        stack,
        adapters=dataclasses.replace(
            stack.adapters,
            factors=put(stack.adapters.factors, one.factors),
            scale=put(stack.adapters.scale, one.scale),
        ),
        opt=optax.tree.set(stack.opt, **opt),
        grad_sum=put(stack.grad_sum, one.grad),
        steps=put(stack.steps, one.steps),
        skipped=put(stack.skipped, one.skipped),
    )
    return lora_tree.constrain(new, transformer.abstract(cfg))


def padded(held: Held, stack: TrainStack) -> OneSlot:
    """A state from the host as a slot of this stack holds it: zeros for what it does not have."""
    shapes = jax.eval_shape(in_bucket, stack, np.int32(0))
    parts = {}
    for name in PARTS:
        mine = held.parts.get(name, {})

        def put(path: str, like: Any, mine: Mapping[str, np.ndarray] = mine) -> np.ndarray:
            out = np.zeros(like.shape, like.dtype)
            if path in mine:
                out[..., : held.config.rank, :] = mine[path]
            return out

        parts[name] = params_lib.map_with_path(put, getattr(shapes, name))
    factors, mu, nu, grad = (parts[name] for name in PARTS)
    counts = (np.int32(n) for n in (held.count, held.steps, held.skipped))
    return OneSlot(factors, mu, nu, grad, np.float32(held.config.scale), *counts)


def taken(
    one: OneSlot, config: AdapterConfig, base_specs: Any, parts_of: Sequence[str] = PARTS
) -> Held:
    """A slot's leaves as a state on the host, with these of ``PARTS``; moments only where an update
    has made them.
    """
    paths = {
        path for path, _ in params_lib.leaves_with_path(lora_tree.adapter_specs(base_specs, config))
    }
    count, steps, skipped = (int(x) for x in jax.device_get((one.count, one.steps, one.skipped)))
    parts = {}
    for name in parts_of:
        if name not in ("mu", "nu") or count:
            mine = {
                path: leaf
                for path, leaf in params_lib.leaves_with_path(getattr(one, name))
                if path in paths
            }
            parts[name] = {
                path: np.array(leaf)[..., : config.rank, :].copy()
                for path, leaf in jax.device_get(mine).items()
            }
    return Held(config, parts, count, steps, skipped)
