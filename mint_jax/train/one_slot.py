"""Transfer of one policy's training state between its slot of a stack and the host."""

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
from mint_jax.train.host_state import PARTS, HostState
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
    """Returns the leaves of one slot; ``read`` is the compiled form."""
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
    """Returns the stack with one slot replaced; its optimizer settings in ``stack.hyper`` stay."""

    def put(all_: Any, own: Any) -> Any:
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_index_in_dim(
                x, y.astype(x.dtype), slot, state_lib.slot_axis(x)
            ),
            all_,
            own,
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


def padded(state: HostState, stack: TrainStack) -> OneSlot:
    """Pads a state from the host with zeros to the shapes of this stack's slots."""
    shapes = jax.eval_shape(in_bucket, stack, np.int32(0))
    parts = {}
    for name in PARTS:
        arrays = state.parts.get(name, {})

        def put(path: str, like: Any, arrays: Mapping[str, np.ndarray] = arrays) -> np.ndarray:
            out = np.zeros(like.shape, like.dtype)
            if path in arrays:
                out[..., : state.config.rank, :] = arrays[path]
            return out

        parts[name] = params_lib.map_with_path(put, getattr(shapes, name))
    factors, mu, nu, grad = (parts[name] for name in PARTS)
    counts = (np.int32(n) for n in (state.count, state.steps, state.skipped))
    return OneSlot(factors, mu, nu, grad, np.float32(state.config.scale), *counts)


def to_host(
    one: OneSlot, config: AdapterConfig, base_specs: Any, parts_of: Sequence[str] = PARTS
) -> HostState:
    """Copies these ``PARTS`` of a slot's leaves to the host; moments only if an update has made
    them.
    """
    paths = {
        path for path, _ in params_lib.leaves_with_path(lora_tree.adapter_specs(base_specs, config))
    }
    count, steps, skipped = (int(x) for x in jax.device_get((one.count, one.steps, one.skipped)))
    parts = {}
    for name in parts_of:
        if name not in ("mu", "nu") or count:
            arrays = {
                path: leaf
                for path, leaf in params_lib.leaves_with_path(getattr(one, name))
                if path in paths
            }
            parts[name] = {
                path: np.array(leaf)[..., : config.rank, :].copy()
                for path, leaf in jax.device_get(arrays).items()
            }
    return HostState(config, parts, count, steps, skipped)
