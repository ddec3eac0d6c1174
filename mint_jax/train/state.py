"""Training state of many policies: adapters, AdamW moments, gradient sums and counters, stacked by
rank bucket.

Only policies in training are stored here. Everything of one policy is one slot of one bucket, so
resuming, switching or dropping a policy is a slot operation.

Axes: L layers, S slots, R rank, D in, F out.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig
from mint_jax.train.config import SCHEDULES, OptimizerConfig


@struct.dataclass
class Hyper:
    """``OptimizerConfig`` as arrays ``[n]``."""

    learning_rate: jax.Array
    b1: jax.Array
    b2: jax.Array
    eps: jax.Array
    weight_decay: jax.Array
    max_grad_norm: jax.Array
    warmup_steps: jax.Array
    total_steps: jax.Array
    schedule: jax.Array
    final_fraction: jax.Array

    @classmethod
    def of(cls, config: OptimizerConfig) -> "Hyper":
        """Returns one policy's hyperparameters, without a slot axis."""
        values = dataclasses.asdict(config)
        values["schedule"] = SCHEDULES.index(config.schedule)
        values["max_grad_norm"] = config.max_grad_norm or math.inf
        return cls(*(np.float32(values[f.name]) for f in dataclasses.fields(cls)))  # type: ignore[arg-type]

    @classmethod
    def stack(cls, configs: Sequence[OptimizerConfig], count: int) -> "Hyper":
        """Returns several policies' hyperparameters, ``[count]`` each; the rest is padding."""
        rows = [cls.of(config) for config in configs]
        rows += [cls.of(OptimizerConfig())] * (count - len(rows))
        return jax.tree.map(lambda *values: np.stack(values), *rows)


@struct.dataclass
class TrainStack:
    """S policies of one rank bucket in training.

    Attributes:
        adapters: factors and scales.
        opt: optax state of ``optimizer``; moments ``[L, S, R, D]``, counts ``[S]``.
        grad_sum: gradients accumulated since the last update, in the shapes of the factors.
        steps: updates applied, ``[S]`` int32.
        skipped: updates skipped because the gradient was not finite, ``[S]`` int32.
    """

    adapters: AdapterStack
    opt: Any
    grad_sum: Any
    steps: jax.Array
    skipped: jax.Array


State = dict[int, TrainStack]  # bucket rank -> stack


def optimizer(
    hyper: Hyper, learning_rate: jax.Array | float
) -> optax.GradientTransformationExtraArgs:
    """Returns AdamW for one policy or one of its factors.

    Hyperparameters may be traced. As inputs of the update's program, new values compile nothing,
    and the optimizer state is only two moments and a count.
    """
    adamw = optax.adamw(
        learning_rate, b1=hyper.b1, b2=hyper.b2, eps=hyper.eps, weight_decay=hyper.weight_decay
    )
    return optax.chain(optax.identity(), adamw)  # checkpoints expect its state in second place


def clip_factor(hyper: Hyper, norm: jax.Array) -> jax.Array:
    """Returns the factor that scales a gradient of this global norm to at most
    ``max_grad_norm``.
    """
    return jnp.where(norm < hyper.max_grad_norm, 1.0, hyper.max_grad_norm / norm)


def by_leaf(opt: Any, factors: Any) -> Any:
    """Returns the optimizer state of every factor, in a tree like theirs: its moments, and the
    shared count.
    """
    tree = jax.tree.structure(factors)

    def of(i: int) -> Any:
        return jax.tree.map(
            lambda x: tree.flatten_up_to(x)[i] if _like(tree, x) else x,
            opt,
            is_leaf=functools.partial(_like, tree),
        )

    return jax.tree.unflatten(tree, [of(i) for i in range(tree.num_leaves)])


def joined(opts: Any, opt: Any, factors: Any) -> Any:
    """Inverts ``by_leaf``: joins ``opts`` to a state in the form of ``opt``."""
    tree = jax.tree.structure(factors)

    def one(leaf: Any, *parts: Any) -> Any:
        return jax.tree.unflatten(tree, parts) if _like(tree, leaf) else parts[0]

    return jax.tree.map(one, opt, *tree.flatten_up_to(opts), is_leaf=functools.partial(_like, tree))


def _like(tree: Any, x: Any) -> bool:
    return jax.tree.structure(x) == tree


def slot_axis(leaf: jax.Array) -> int:
    """Returns the slot axis: 1 for factors and moments, 0 for per-policy numbers."""
    return lora_tree.SLOT_AXIS if leaf.ndim > 1 else 0


def empty(
    base_specs: Any, configs: list[AdapterConfig], slots: dict[int, int] | None = None
) -> State:
    """Returns an empty state with slots for these adapters: ``slots[bucket]`` of each bucket, or
    one for each adapter.
    """
    counts: dict[int, int] = {}
    targets: dict[int, list[str]] = {}
    for config in configs:
        counts[config.bucket] = counts.get(config.bucket, 0) + 1
        targets.setdefault(config.bucket, []).extend(
            t for t in config.targets if t not in targets.get(config.bucket, [])
        )
    out = {}
    for bucket in sorted(counts):
        count = (slots or counts)[bucket]
        stack = lora_tree.empty_stack(base_specs, targets[bucket], bucket, count)
        zeros = jax.tree.map(jnp.zeros_like, stack.factors)
        one_slot = jax.tree.map(lambda x: x[:, 0], stack.factors)
        fresh = optimizer(Hyper.of(OptimizerConfig()), 0.0).init(one_slot)
        opt = jax.tree.map(functools.partial(_spread, count), fresh)
        counters = jnp.zeros((count,), jnp.int32)
        out[bucket] = TrainStack(stack, opt, zeros, counters, jnp.zeros_like(counters))
    return out


def _spread(slots: int, leaf: Any) -> jax.Array:
    """Broadcasts one policy's optimizer leaf to all slots, as zeros."""
    leaf = jnp.asarray(leaf)
    axis = 0 if leaf.ndim == 0 else lora_tree.SLOT_AXIS
    return jnp.zeros((*leaf.shape[:axis], slots, *leaf.shape[axis:]), leaf.dtype)


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


def slot_of(stack: TrainStack, slot: jax.Array) -> OneSlot:
    """Returns the leaves of one slot; ``read_slot`` is the compiled form."""
    of = functools.partial(
        jax.tree.map,
        lambda x: jax.lax.dynamic_index_in_dim(x, slot, slot_axis(x), keepdims=False),
    )
    return OneSlot(*map(of, _leaves(stack)))


read_slot = jax.jit(slot_of)


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("stack",))
def write_slot(stack: TrainStack, slot: jax.Array, one: OneSlot, cfg: ModelConfig) -> TrainStack:
    """Returns the stack with one slot replaced; one program writes any policy of a bucket."""

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), slot, slot_axis(x))

    new = jax.tree.map(put, _leaves(stack), one)
    moments = {name: getattr(new, name) for name in ("mu", "nu", "count")}
    stack = TrainStack(
        dataclasses.replace(stack.adapters, factors=new.factors, scale=new.scale),
        optax.tree.set(stack.opt, **moments),
        new.grad,
        new.steps,
        new.skipped,
    )
    return lora_tree.constrain(stack, transformer.abstract(cfg))


def _leaves(stack: TrainStack) -> OneSlot:
    """Returns the leaves of all slots in the form of one."""
    mu, nu, count = (optax.tree.get(stack.opt, name) for name in ("mu", "nu", "count"))
    own = stack.adapters
    return OneSlot(
        own.factors, mu, nu, stack.grad_sum, own.scale, count, stack.steps, stack.skipped
    )
