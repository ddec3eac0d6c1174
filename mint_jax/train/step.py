"""The multi-policy step: one forward and backward pass through the base for all policies' rows,
then each policy's own update. The base is read only; its gradient is never formed.

Rows of a batch are policy blocks in the order of ``slots``: buckets by rank, then slots as given.

Axes: P policies, B rows of a policy, T tokens, M targets of a row, S slots.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mint_jax import sharding
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import Stacks
from mint_jax.lora.view import AdapterView, attach_blocks, taps_of
from mint_jax.models import transformer
from mint_jax.models.attention import Segments
from mint_jax.models.config import ModelConfig
from mint_jax.models.logprobs import logprobs_and_entropy
from mint_jax.models.precision import as_stored
from mint_jax.train import state as state_lib
from mint_jax.train.batch import Batch
from mint_jax.train.losses import LossCoefs, LossFn, policy_loss
from mint_jax.train.optimizers import DIRECTIONS
from mint_jax.train.state import SCHEDULES, Hyper, State, TrainStack

Slots = dict[int, jax.Array]  # bucket rank -> [n] int32, distinct slots


def batch_logprobs(
    params: Any,
    lora: AdapterView | None,
    batch: Batch,
    cfg: ModelConfig,
    remat: str = "none",
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns ``log p(target)`` at each target's temperature, float32 ``[P, B, M]`` or ``[P, B, M
    K]``; for single targets the entropy of these distributions, ``[P, B, M]``; and with recorded
    routes the share of replayed experts, averaged over layers, that the router would not have
    chosen before each target, ``[P, B, M]``.
    """
    P, B, T, M = batch.shape
    rows = P * B

    def flat(x: jax.Array) -> jax.Array:
        return sharding.constrain(x.reshape(rows, x.shape[-1]), "batch", "tokens")

    segments = Segments(flat(batch.own), flat(batch.parent))
    replay = (
        None if batch.routes is None else batch.routes.reshape(batch.routes.shape[0], rows, T, -1)
    )
    inputs = transformer.DecoderInputs(
        flat(batch.tokens), flat(batch.positions), segments, replay=replay
    )
    h, kept = transformer.hidden_states(
        params, lora, inputs, cfg, keep_routes=replay is not None, remat=remat
    )
    picked = jnp.take_along_axis(h, flat(batch.index)[..., None], axis=1)
    sharp = None if batch.inverse_temperature is None else flat(batch.inverse_temperature)
    targets = batch.target.reshape(rows, *batch.target.shape[2:])
    how = sharp, cfg.logit_cap, entropy_gradient
    logp, entropy = logprobs_and_entropy(params, lora, picked, targets, *how)
    logp = logp.reshape(P, B, -1)
    entropy = entropy.reshape(P, B, M) if targets.ndim == 2 else None
    if replay is None:
        return logp, entropy, None
    of_layers = [kept[stack]["missed"] for stack in cfg.routed_layers]
    missed = jnp.mean(jnp.concatenate(of_layers), axis=0)
    missed = jnp.take_along_axis(missed, flat(batch.index), axis=1).reshape(P, B, M)
    return logp, entropy, missed


@functools.partial(jax.jit, static_argnames=("cfg",))
@as_stored
def score(
    params: Any, batch: Batch, coefs: LossCoefs, stacks: Stacks, slots: Slots, *, cfg: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Runs ``forward_backward`` without the backward pass; returns log-probabilities and each
    block's loss ``[P]``.

    Args:
        batch: P blocks: first those of ``slots`` in their order, then those under the bare base.
        stacks: adapters; empty if every block is under the bare base.
    """
    bare = batch.shape[0] - sum(s.shape[0] for s in slots.values())
    lora = (
        attach_blocks(stacks, slots, base_blocks=bare, dtype=params["final_norm"].dtype)
        if slots
        else None
    )
    logp, *_ = batch_logprobs(params, lora, batch, cfg)
    return logp, jax.vmap(policy_loss)(logp, batch.loss, coefs)[0]


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "remat", "custom", "entropy_gradient"),
    donate_argnames=("state",),
)
@as_stored
def forward_backward(
    params: Any,
    state: State,
    batch: Batch,
    coefs: LossCoefs,
    slots: Slots,
    *,
    cfg: ModelConfig,
    remat: str = "none",
    custom: tuple[LossFn, ...] = (),
    entropy_gradient: bool = False,
) -> tuple[State, jax.Array, dict[str, jax.Array]]:
    """Adds each policy's gradient to its sum, the only change of the donated state. Returns it,
    logprobs ``[P, B, M]`` and metrics ``[P]``.

    Args:
        slots: slot of each of the batch's policies, in order. Gradients of a repeated slot add up;
            those of an out-of-range slot, which is padding, are dropped.
        remat: a key of ``transformer.REMAT``.
        custom: registered losses that ``coefs`` selects.
        entropy_gradient: some of ``coefs`` have an entropy bonus.
    """
    dtype = params["final_norm"].dtype
    buckets = sorted(slots)
    stacks = {b: state[b].adapters for b in buckets}
    specs = transformer.abstract(cfg)
    if (dropout := batch.dropout) is not None:
        tries = [(state[b].steps + state[b].skipped).at[slots[b]].get(mode="clip") for b in buckets]
        dropout = dropout.fold(jnp.concatenate(tries)[:, None, None])

    def loss(taps):
        taps = lora_tree.constrain(taps, specs)  # constrains their gradients too
        lora = attach_blocks(stacks, slots, taps, dtype=dtype, dropout=dropout)
        logp, entropy, missed = batch_logprobs(params, lora, batch, cfg, remat, entropy_gradient)
        losses, metrics = jax.vmap(functools.partial(policy_loss, custom=custom))(
            logp, batch.loss, coefs, entropy
        )
        if missed is not None:
            is_target = jnp.any(batch.loss.weights.reshape(*missed.shape, -1) != 0, axis=-1)
            metrics["out_of_route_sum"] = jnp.sum(missed * is_target, axis=(1, 2))
        # A policy's loss depends on its own adapter only, so the gradient of the sum is every
        # policy's own gradient, from one backward pass of the base.
        return jnp.sum(losses), (logp, metrics | {"loss": losses})

    grads, (logp, metrics) = jax.grad(loss, has_aux=True)(taps_of(stacks, slots))
    new = dict(state)
    for b in buckets:
        sums = _added(state[b].grad_sum, grads[b], slots[b])
        new[b] = dataclasses.replace(state[b], grad_sum=sums)
    return lora_tree.constrain(new, specs), logp, metrics


def _added(sums: Any, parts: Any, slots: jax.Array) -> Any:
    """Adds each policy's part to its slot's sum, one after another."""

    # A scatter would transpose all parts first, which takes their size again in memory (39 MB for
    # four policies of rank 8 on SmolLM2).
    def add(n: jax.Array, total: jax.Array, part: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_index_in_dim(total, slots[n], lora_tree.SLOT_AXIS)
        one = jax.lax.dynamic_index_in_dim(part, n, lora_tree.SLOT_AXIS).astype(total.dtype)
        return jax.lax.dynamic_update_slice_in_dim(
            total,
            jnp.where(slots[n] < total.shape[lora_tree.SLOT_AXIS], old + one, old),
            slots[n],
            lora_tree.SLOT_AXIS,
        )

    return jax.lax.fori_loop(
        0,
        slots.shape[0],
        lambda n, sums: jax.tree.map(functools.partial(add, n), sums, parts),
        sums,
    )


@functools.partial(jax.jit, static_argnames=("kind",), donate_argnames=("state",))
def optim_step(
    state: State, slots: Slots, hyper: dict[int, Hyper], kind: str = "adamw"
) -> tuple[State, dict[str, jax.Array]]:
    """Updates policies from their gradient sums and clears these. A policy whose gradient is not
    finite keeps its adapter and moments, and its ``skipped`` count increases. ``slots`` are
    distinct, followed by out-of-range slots of padding; ``hyper`` has ``[n]`` each, and ``kind`` is
    the optimizer of all.

    Returns the state, and metrics ``[P]`` in the order of ``slots``, with zeros for padding.
    """
    new, rows, direction = dict(state), [], DIRECTIONS[kind]
    for b in sorted(slots):
        # One policy after another: an update is bound by memory bandwidth, and ``vmap`` would
        # multiply its temporaries by the number of policies.
        count = jnp.sum(slots[b] < state[b].steps.shape[0])
        _, one = jax.eval_shape(
            functools.partial(_update_nth, direction), slots[b], hyper[b], 0, state[b]
        )
        zeros = {name: jnp.zeros(slots[b].shape, x.dtype) for name, x in one.items()}
        update = functools.partial(_update_and_note, direction, slots[b], hyper[b])
        with jax.named_scope("policies"):
            new[b], metrics = jax.lax.fori_loop(0, count, update, (state[b], zeros))
        rows.append(metrics)
    return new, jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)


def _update_and_note(
    direction: Any, slots: jax.Array, hypers: Hyper, n: jax.Array, carry: tuple[TrainStack, Any]
) -> tuple[TrainStack, Any]:
    stack, metrics = _update_nth(direction, slots, hypers, n, carry[0])
    return stack, jax.tree.map(lambda all_, one: all_.at[n].set(one), carry[1], metrics)


def _update_nth(
    direction: Any, slots: jax.Array, hypers: Hyper, n: jax.Array | int, stack: TrainStack
) -> tuple[TrainStack, dict[str, jax.Array]]:
    """Applies an optimizer to the n-th of these slots in place, leaf by leaf; the learning rate of
    B is ``b_ratio`` times that of A (LoRA+, arXiv 2402.12354); 0 leaves B and its gradient out.
    """
    slot, hyper = slots[n], jax.tree.map(lambda x: x[n], hypers)

    def at(x: jax.Array, slot: jax.Array = slot) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, slot, state_lib.slot_axis(x), keepdims=False)

    def ratio(path: Any) -> Any:
        return hyper.b_ratio if path[-1].key == "b" else 1.0

    steps = at(stack.steps)
    counted = jax.tree_util.tree_map_with_path(
        lambda path, grad: jnp.where(ratio(path) == 0, 0.0, at(grad)), stack.grad_sum
    )
    norm = optax.global_norm(counted)
    fine = jnp.isfinite(norm)
    rate = scheduled_rate(hyper, steps)
    clip = jnp.where(norm < hyper.max_grad_norm, 1.0, hyper.max_grad_norm / norm)

    def update(ratio: Any, slot: jax.Array, factor: Any, grad: Any, *old: jax.Array) -> Any:
        change, *moments = direction(hyper, steps, grad * clip, *old)
        new = factor - rate * ratio * (change + hyper.weight_decay * factor), *moments
        moves = fine & (ratio != 0)
        factor, *moments = (jnp.where(moves, n, o) for n, o in zip(new, (factor, *old)))
        return slot, (factor, jnp.zeros_like(grad), *moments)

    def put(slot: jax.Array, old: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(old, part, slot, state_lib.slot_axis(old))

    def in_place(slot: jax.Array, leaf: Any, ratio: Any) -> Any:
        own_update = functools.partial(update, ratio)
        own = jax.tree.map(functools.partial(at, slot=slot), leaf)
        # The condition always holds. Without a branch XLA fuses the reads above with the writes
        # below, sees them overlap, and copies the whole stack first. The zeroed gradient passes
        # through the branch too, because the norm reads what it replaces, and so does the slot, so
        # that the next leaf is read only after this one. The barrier makes it wait for the writes
        # as well: without it, TPUs held all new leaves at once (Qwen3-4B, 16 policies of rank 32 on
        # v5p:2x2x1: temporaries of 873 MB instead of 238).
        skip = functools.partial(_zeros_like, own_update)
        slot, new = jax.lax.cond(slot >= 0, own_update, skip, slot, *own)
        return jax.lax.optimization_barrier(
            (slot, jax.tree.map(functools.partial(put, slot), leaf, new))
        )

    # Temporaries are of one factor; those of all factors are 71 MB in SmolLM2 at rank 8.
    trees = stack.adapters.factors, stack.grad_sum, stack.mu, stack.nu
    done, turn = [], slot
    paths = (path for path, _ in jax.tree.leaves_with_path(trees[0]))
    for path, *leaf in zip(paths, *map(jax.tree.leaves, trees)):
        turn, new = in_place(turn, tuple(leaf), ratio(path))
        done.append(new)
    tree = jax.tree.structure(trees[0])
    factors, grads, mu, nu = (jax.tree.unflatten(tree, part) for part in zip(*done))
    stack = dataclasses.replace(
        stack,
        adapters=dataclasses.replace(stack.adapters, factors=factors),
        mu=mu,
        nu=nu,
        grad_sum=grads,
        steps=put(slot, stack.steps, steps + fine),
        skipped=put(slot, stack.skipped, at(stack.skipped) + ~fine),
    )
    return stack, {"grad_norm": norm, "learning_rate": rate, "skipped": (~fine).astype(jnp.float32)}


def _zeros_like(fn: Any, *args: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, *args))


def scheduled_rate(hyper: Hyper, steps: jax.Array) -> jax.Array:
    """Returns the learning rate of the update after ``steps`` updates; elementwise."""
    step = steps.astype(jnp.float32) + 1.0
    warm = jnp.minimum(step / jnp.maximum(hyper.warmup_steps, 1.0), 1.0)
    span = jnp.maximum(hyper.total_steps - hyper.warmup_steps, 1.0)
    progress = jnp.clip((step - 1.0 - hyper.warmup_steps) / span, 0.0, 1.0)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    kind = hyper.schedule
    shape = jnp.where(
        kind == SCHEDULES.index("linear"),
        1 - progress,
        jnp.where(kind == SCHEDULES.index("cosine"), cosine, 1.0),
    )
    return hyper.learning_rate * warm * (hyper.final_fraction + (1 - hyper.final_fraction) * shape)
