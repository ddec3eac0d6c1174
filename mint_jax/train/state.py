"""Training state of many policies: adapters, AdamW moments, gradient sums and counters, stacked by
rank bucket.

Only policies in training are here. Everything of one policy is one slot of one bucket, so that
resuming, switching or dropping a policy is a slot operation, and the base appears nowhere.

Axes: L layers, S slots, R rank, D in, F out.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack
from mint_jax.train.config import SCHEDULES, OptimizerConfig


@struct.dataclass
class Hyper:
    """``OptimizerConfig`` as arrays ``[S]``."""

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
    def zeros(cls, slots: int) -> "Hyper":
        return cls(*(jnp.zeros((slots,), jnp.float32) for _ in dataclasses.fields(cls)))

    @classmethod
    def of(cls, config: OptimizerConfig) -> "Hyper":
        """One policy's numbers, without a slot axis."""
        values = dataclasses.asdict(config)
        values["schedule"] = SCHEDULES.index(config.schedule)
        values["max_grad_norm"] = config.max_grad_norm or math.inf
        return cls(*(np.float32(values[f.name]) for f in dataclasses.fields(cls)))  # type: ignore[arg-type]

    def put(self, slot: jax.Array | int, mine: "Hyper") -> "Hyper":
        """``mine``, from ``of``, in that slot."""
        return jax.tree.map(lambda all_S, x: all_S.at[slot].set(x), self, mine)


@struct.dataclass
class TrainStack:
    """S policies of one rank bucket in training.

    Attributes:
        adapters: their factors and scales.
        opt: optax state of ``optimizer``; moments ``[L, S, R, D]``, counts ``[S]``.
        grad_sum: gradients accumulated since the last update, like the factors.
        hyper: ``[S]`` each.
        steps: updates applied, ``[S]`` int32.
        skipped: updates refused because the gradient was not finite, ``[S]`` int32.
    """

    adapters: AdapterStack
    opt: Any
    grad_sum: Any
    hyper: Hyper
    steps: jax.Array
    skipped: jax.Array


State = dict[int, TrainStack]  # bucket rank -> stack


def optimizer(
    hyper: Hyper, learning_rate: jax.Array | float
) -> optax.GradientTransformationExtraArgs:
    """AdamW of one policy, or of one of its factors. Its numbers may be traced: as data of the
    update's program, other ones compile nothing, and the optimizer's own state is two moments and a
    count.
    """
    adamw = optax.adamw(
        learning_rate, b1=hyper.b1, b2=hyper.b2, eps=hyper.eps, weight_decay=hyper.weight_decay
    )
    return optax.chain(optax.identity(), adamw)  # checkpoints have its state in second place


def clip_factor(hyper: Hyper, norm: jax.Array) -> jax.Array:
    """What a policy's gradient of this global norm is multiplied by, so that its norm is at most
    ``max_grad_norm``.
    """
    return jnp.where(norm < hyper.max_grad_norm, 1.0, hyper.max_grad_norm / norm)


def by_leaf(opt: Any, factors: Any) -> Any:
    """The optimizer's state of every factor, in a tree like theirs: its moments, and what all of
    them share, the count.
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
    """The state of which ``by_leaf`` made ``opts``, in the form of ``opt``."""
    tree = jax.tree.structure(factors)

    def one(held: Any, *parts: Any) -> Any:
        return jax.tree.unflatten(tree, parts) if _like(tree, held) else parts[0]

    return jax.tree.map(one, opt, *tree.flatten_up_to(opts), is_leaf=functools.partial(_like, tree))


def _like(tree: Any, x: Any) -> bool:
    return jax.tree.structure(x) == tree


def slot_axis(leaf: jax.Array) -> int:
    """Factors and moments carry slots on axis 1, per-policy numbers on axis 0."""
    return lora_tree.SLOT_AXIS if leaf.ndim > 1 else 0


def empty(
    base_specs: Any, configs: list[AdapterConfig], slots: dict[int, int] | None = None
) -> State:
    """A state with slots for these adapters, one slot each unless ``slots`` says how many a bucket
    has.
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
        out[bucket] = TrainStack(
            stack, opt, zeros, Hyper.zeros(count), counters, jnp.zeros_like(counters)
        )
    return out


def _spread(slots: int, leaf: Any) -> jax.Array:
    """One policy's optimizer leaf -> that leaf for all slots."""
    leaf = jnp.asarray(leaf)
    axis = 0 if leaf.ndim == 0 else lora_tree.SLOT_AXIS
    return jnp.zeros((*leaf.shape[:axis], slots, *leaf.shape[axis:]), leaf.dtype)


def start(
    stack: TrainStack, slot: jax.Array | int, adapter: Any, scale: jax.Array | float, hyper: Hyper
) -> TrainStack:
    """Puts a policy into a slot with fresh moments and counters; all other slots stay as they are.

    Everything but the stack's shapes is data, so that one program starts any policy of a bucket.

    Args:
        hyper: the policy's numbers, from ``Hyper.of``.
    """
    return TrainStack(
        adapters=lora_tree.write_slot(stack.adapters, slot, adapter, scale),
        opt=_zero_slot(stack.opt, slot),
        grad_sum=_zero_slot(stack.grad_sum, slot),
        hyper=stack.hyper.put(slot, hyper),
        steps=stack.steps.at[slot].set(0),
        skipped=stack.skipped.at[slot].set(0),
    )


def _zero_slot(tree: Any, slot: jax.Array | int) -> Any:
    def zero(x: jax.Array) -> jax.Array:
        return x.at[slot].set(0) if slot_axis(x) == 0 else x.at[:, slot].set(0)

    return jax.tree.map(zero, tree)
