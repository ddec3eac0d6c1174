"""Training state of the policies in training: adapters, AdamW moments, gradient sums and counters,
stacked by rank bucket. Everything of one policy is one slot of one bucket.

Axes: L layers, S slots, R rank, D in, F out.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig
from mint_jax.train.config import SCHEDULES, OptimizerConfig

# ``OptimizerConfig`` as arrays ``[n]``, but its kind
Hyper = collections.namedtuple(
    "Hyper", [field.name for field in dataclasses.fields(OptimizerConfig) if field.name != "kind"]
)


def stack_hyper(configs: Sequence[OptimizerConfig], count: int) -> Hyper:
    """Returns several policies' hyperparameters, ``[count]`` each; the rest is padding."""
    rows = []
    for config in [*configs, *[OptimizerConfig()] * (count - len(configs))]:
        kind, clip = SCHEDULES.index(config.schedule), config.max_grad_norm or math.inf
        values = dataclasses.asdict(config) | {"schedule": kind, "max_grad_norm": clip}
        rows.append([values[name] for name in Hyper._fields])
    return Hyper(*np.array(rows, np.float32).T)


@struct.dataclass
class TrainStack:
    """S policies of one rank bucket in training; also one slot of them, without the slot axis.

    Attributes:
        mu, nu: moments of the gradients, in the shapes of the factors; dimuon has no second one.
        grad_sum: gradients accumulated since the last update, in the shapes of the factors.
        steps, skipped: ``[S]`` int32, updates applied, and those whose gradient was not finite.
    """

    adapters: AdapterStack
    mu: Any
    nu: Any
    grad_sum: Any
    steps: jax.Array
    skipped: jax.Array


State = dict[int, TrainStack]  # bucket rank -> stack


def slot_axis(leaf: jax.Array) -> int:
    return lora_tree.SLOT_AXIS if leaf.ndim > 1 else 0  # steps, skipped and scale have one axis


def empty(
    base_specs: Any, configs: list[AdapterConfig], slots: dict[int, int] | None = None
) -> State:
    """Returns an empty state of ``slots[bucket]`` slots, or one for each adapter."""
    out = {}
    for bucket in sorted({config.bucket for config in configs}):
        own = [config for config in configs if config.bucket == bucket]
        targets = list(dict.fromkeys(target for config in own for target in config.names))
        count = slots[bucket] if slots else len(own)
        stack = lora_tree.empty_stack(base_specs, targets, bucket, count)
        zeros = lambda stack=stack: jax.tree.map(jnp.zeros_like, stack.factors)  # noqa: E731
        steps, skipped = (jnp.zeros((count,), jnp.int32) for _ in range(2))
        out[bucket] = TrainStack(stack, zeros(), zeros(), zeros(), steps, skipped)
    return out


def slot_of(stack: TrainStack, slot: jax.Array) -> TrainStack:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, slot, slot_axis(x), keepdims=False), stack
    )


read_slot = jax.jit(slot_of)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("stack",))
def write_slot(stack: TrainStack, slot: jax.Array, one: TrainStack, cfg: ModelConfig) -> TrainStack:
    """Returns the stack with one slot replaced; one program writes any policy of a bucket."""

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), slot, slot_axis(x))

    return lora_tree.constrain(jax.tree.map(put, stack, one), transformer.abstract(cfg))
