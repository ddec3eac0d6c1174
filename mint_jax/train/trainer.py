"""Many policies in training over one resident base: names to slots, groups to batches, batches to
updates.

The host-side object that jobs, benches and the service share. It owns the training state and
nothing else: no files, no prompts, no rewards.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax import multihost
from mint_jax import params as params_lib
from mint_jax.data.buckets import ShapeBook
from mint_jax.errors import UserError, choice
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack, Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.config import ModelConfig
from mint_jax.train import losses, one_slot
from mint_jax.train import state as state_lib
from mint_jax.train import step as step_lib
from mint_jax.train.batch import (
    Batch,
    Group,
    Place,
    TrainSequence,
    mask_unrouted,
    pack,
    padded_tokens,
)
from mint_jax.train.config import KL_KINDS, LossConfig, PolicyConfig
from mint_jax.train.held import Held
from mint_jax.train.losses import LossCoefs, LossFn
from mint_jax.train.state import Hyper, State, TrainStack


def _coefs(loss: LossConfig, custom: tuple[LossFn, ...]) -> LossCoefs:
    """A loss as numbers, for a program that has these registered losses."""
    beta = loss.dro_beta if loss.kind == "dro" else loss.dpo_beta
    kinds = losses.index_of(loss.kind, custom), KL_KINDS.index(loss.kl_kind)
    bounds = 1.0 - loss.low, 1.0 + loss.clip_high
    return LossCoefs(kinds[0], *bounds, kinds[1], loss.kl, loss.band_low, loss.band_high, beta)  # type: ignore[arg-type]


def stack_coefs(configs: Sequence[LossConfig], custom: tuple[LossFn, ...] = ()) -> LossCoefs:
    """``LossCoefs`` of ``[P]`` arrays."""

    rows = [_coefs(c, custom) for c in configs]
    kinds = ("kind", "kl_kind")
    columns = (
        np.array([getattr(row, name) for row in rows], np.int32 if name in kinds else np.float32)
        for name in LossCoefs._fields
    )
    return LossCoefs(*columns)  # type: ignore[arg-type]


# A version of weights: a number that no other weights of this process have, known at once; their
# digest takes a copy to the host.
_versions = itertools.count(1)


@functools.partial(jax.jit, static_argnames=("cfg", "adapters"))
def _empty(cfg: ModelConfig, adapters: tuple[AdapterConfig, ...]) -> State:
    specs = transformer.abstract(cfg)
    return lora_tree.constrain(state_lib.empty(specs, list(adapters)), specs)


@functools.partial(jax.jit, static_argnames=("cfg", "adapter"), donate_argnames=("stack",))
def _started(
    stack: TrainStack,
    weights: Any,
    slot: jax.Array,
    scale: jax.Array,
    hyper: Hyper,
    cfg: ModelConfig,
    adapter: AdapterConfig,
) -> TrainStack:
    """``state.start`` with given weights or, where they are a seed, fresh ones.

    A program for each rank and targets, and not one for all policies at once: compiling that took
    0.7 s a policy.
    """
    specs = transformer.abstract(cfg)
    if not isinstance(weights, dict):
        weights = lora_tree.init_adapter(specs, adapter, jax.random.key(weights))
    return lora_tree.constrain(state_lib.start(stack, slot, weights, scale, hyper), specs)


@functools.partial(jax.jit, static_argnames=("cfg", "adapter"))
def _read(stack: AdapterStack, slot: jax.Array, cfg: ModelConfig, adapter: AdapterConfig) -> Any:
    return lora_tree.read_slot(
        stack, slot, adapter.rank, lora_tree.adapter_specs(transformer.abstract(cfg), adapter)
    )


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("larger",))
def _grown(larger: TrainStack, stack: TrainStack, cfg: ModelConfig) -> TrainStack:
    """A larger stack whose first slots are those of ``stack``; what that one does not hold stays
    zero.
    """
    held = dict(jax.tree_util.tree_leaves_with_path(stack))

    def put(path: Any, new: jax.Array) -> jax.Array:
        if (old := held.get(path)) is None:
            return new
        return jax.lax.dynamic_update_slice(new, old, (0,) * new.ndim)

    return lora_tree.constrain(
        jax.tree_util.tree_map_with_path(put, larger), transformer.abstract(cfg)
    )


@functools.partial(jax.jit, static_argnames=("index", "cfg"))
def _without(stack: TrainStack, index: int, cfg: ModelConfig) -> TrainStack:
    """The stack without one slot."""
    smaller = jax.tree.map(lambda x: jnp.delete(x, index, state_lib.slot_axis(x)), stack)
    return lora_tree.constrain(smaller, transformer.abstract(cfg))


class Trainer:
    """The policies in training and their state on the devices.

    Args:
        base: the resident base; read, never written.
        policies: names must differ.
        max_tokens: tokens of one forward and backward, rows filled up to the longest of a policy;
            larger updates accumulate over several.
        remat: what the backward pass keeps, a key of ``transformer.REMAT``.

    Attributes:
        versions: of each policy's adapter as it is now; a new one whenever it may have changed.

    Raises:
        UserError: duplicate names, a rank or target the base cannot have.
    """

    def __init__(
        self,
        base: Base,
        policies: Sequence[PolicyConfig],
        max_tokens: int = 16384,
        remat: str = "names",
    ):
        if remat not in transformer.REMAT:
            raise choice("remat", remat, transformer.REMAT)
        names = [p.name for p in policies]
        if len(set(names)) != len(names):
            raise UserError(f"policy names {names} are not distinct: rename one")
        self.base = base
        self.policies = {p.name: p for p in policies}
        self.max_tokens = max_tokens
        self.remat = remat
        self.specs = transformer.abstract(base.cfg)
        self.shapes = ShapeBook()
        self.slots = self._assign(policies)
        self.versions: dict[str, int] = {}
        self._references: dict[str, tuple[AdapterConfig, Any]] = {}
        # of the references, made when first used
        self._resident: tuple[Stacks, dict[str, Slot]] | None = None
        with jax.set_mesh(base.mesh):
            self.state = _empty(cfg=base.cfg, adapters=tuple(p.adapter for p in policies))
            for p in policies:
                self._start(p, np.uint32(p.seed & 0xFFFFFFFF))

    @property
    def state(self) -> State:
        """What training updates; who sets it may have set anybody's adapter."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._renew(self.policies)

    def _renew(self, names: Iterable[str]) -> None:
        self.versions |= {name: next(_versions) for name in names}

    def join(self, policy: PolicyConfig) -> None:
        """Takes one more policy into training; the others keep their state. Only the stack of its
        rank bucket is made anew, larger, and only programs in which that stack takes part are
        compiled again.

        Raises:
            UserError: the name is taken, or a rank or target the base cannot have.
        """
        if policy.name in self.policies:
            raise UserError(f"policy {policy.name!r} is in training already: choose another name")
        policies, bucket = [*self.policies.values(), policy], policy.adapter.bucket
        with jax.set_mesh(self.base.mesh):
            larger = _empty(
                cfg=self.base.cfg,
                adapters=tuple(p.adapter for p in policies if p.adapter.bucket == bucket),
            )[bucket]
            if bucket in self.state:
                larger = _grown(larger, self.state[bucket], cfg=self.base.cfg)
            self._state = dict(sorted((self.state | {bucket: larger}).items()))
            self.policies[policy.name] = policy
            self.slots = self._assign(policies)
            self._start(policy, np.uint32(policy.seed & 0xFFFFFFFF))

    def leave(self, name: str) -> None:
        """Takes a policy out of training and frees its slot; the others keep their state, those
        behind it in a slot one lower.

        Raises:
            UserError: an unknown policy.
        """
        self._order([name])
        bucket, index = self.slots[name].bucket, self.slots[name].index
        rest = [p for p in self.policies.values() if p.name != name]
        state = dict(self.state)
        with jax.set_mesh(self.base.mesh):
            if any(p.adapter.bucket == bucket for p in rest):
                state[bucket] = _without(state[bucket], index, cfg=self.base.cfg)
            else:
                del state[bucket]
        self._state, self.policies = state, {p.name: p for p in rest}
        self.slots = self._assign(rest)
        del self.versions[name]
        if self._references.pop(name, None) is not None:
            self._resident = None

    def held(self, name: str) -> Held:
        """A copy of a policy's state on the host: adapter, moments, the gradients that have
        accumulated, counters.
        """
        return one_slot.taken(self._one(name), self.policies[name].adapter, self.specs)

    def restore(self, name: str, held: Held) -> None:
        """Gives a policy the state that ``held`` returned, with the same bits.

        Raises:
            UserError: an unknown policy, or a state that does not fit its config.
        """
        self._order([name])
        lora_tree.check_fits(
            held.adapter(), self.policies[name].adapter, self.specs, f"policy {name!r}"
        )
        self._put(name, one_slot.padded(held, self.state[self.slots[name].bucket]))

    def gradient(self, name: str) -> Any:
        """The gradients that have accumulated since a policy's last update, a tree like
        ``adapter``.
        """
        held = one_slot.taken(self._one(name), self.policies[name].adapter, self.specs, ["grad"])
        return params_lib.nest(dict(held.parts["grad"]))

    def gradients(
        self, groups: Mapping[str, Sequence[Group]]
    ) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        """The gradients of these groups alone, and their metrics, by policy; the state stays as it
        is.
        """
        before, versions = (
            {name: self._one(name) for name in self._order(list(groups))},
            dict(self.versions),
        )
        try:
            for name, one in before.items():
                self._put(name, one._replace(grad=jax.tree.map(np.zeros_like, one.grad)))
            totals = self.forward_backward(groups)
            return {name: self.gradient(name) for name in before}, {
                name: summarise(totals[name]) for name in before
            }
        finally:
            for name, one in before.items():
                self._put(name, one)
            self.versions = versions

    def _one(self, name: str) -> one_slot.OneSlot:
        self._order([name])
        at = self.slots[name]
        with jax.set_mesh(self.base.mesh):
            return multihost.whole(one_slot.read(self.state[at.bucket], np.int32(at.index)))

    def _put(self, name: str, one: one_slot.OneSlot) -> None:
        at = self.slots[name]
        with jax.set_mesh(self.base.mesh):
            self._state = {
                **self.state,
                at.bucket: one_slot.write(
                    self.state[at.bucket], np.int32(at.index), one, cfg=self.base.cfg
                ),
            }
        self._renew([name])

    def _start(self, policy: PolicyConfig, weights: Any) -> None:
        """Puts a policy into its slot: an adapter, or a fresh one from a seed."""
        at, config = self.slots[policy.name], policy.adapter
        stack, numbers = self.state[at.bucket], Hyper.of(policy.optimizer)
        shape = AdapterConfig(config.rank, targets=config.targets)  # the scale is data
        where = np.int32(at.index), np.float32(config.scale)
        self._renew([policy.name])
        self._state = {
            **self.state,
            at.bucket: _started(stack, weights, *where, numbers, cfg=self.base.cfg, adapter=shape),
        }

    @staticmethod
    def _assign(policies: Sequence[PolicyConfig]) -> dict[str, Slot]:
        taken: dict[int, int] = {}
        slots = {}
        for p in policies:
            bucket = p.adapter.bucket
            slots[p.name] = Slot(bucket, taken.get(bucket, 0))
            taken[bucket] = taken.get(bucket, 0) + 1
        return slots

    @property
    def stacks(self) -> Stacks:
        """The adapters as the sampling engine takes them: the very arrays that training updates, no
        copy.
        """
        return {bucket: stack.adapters for bucket, stack in self.state.items()}

    def _order(self, names: Sequence[str]) -> list[str]:
        """Policies in block order: by bucket, then slot."""
        if not names:
            raise UserError("no policies are named: give at least one")
        unknown = [n for n in names if n not in self.slots]
        if unknown:
            raise UserError(
                f"policy {unknown[0]!r} is not in training; policies are {', '.join(self.slots)}"
            )
        return sorted(names, key=lambda name: self.slots[name])

    def _slot_arrays(self, ordered: Sequence[str]) -> dict[int, np.ndarray]:
        buckets = sorted({self.slots[n].bucket for n in ordered})
        return {
            b: np.array(
                [self.slots[n].index for n in ordered if self.slots[n].bucket == b], np.int32
            )
            for b in buckets
        }

    def _passes(
        self, groups: Mapping[str, Sequence[Group]], ordered: Sequence[str]
    ) -> Iterator[dict[str, list[Group]]]:
        """Micro-batches, each with groups of some policies, within ``max_tokens`` if single groups
        allow it.

        A policy that has no room beside the others waits for a pass of its own: were every policy
        in every pass, with fewer of its groups, each pass would make the gradients of all and add
        them to sums. A power of two of them are together, so that lengths, which vary from step to
        step, ask for few programs.
        """
        room = self.max_tokens // max(padded_tokens(groups[n]) for n in ordered)
        together = len(ordered) if room >= len(ordered) else 1 << max(0, room.bit_length() - 1)
        for first in range(0, len(ordered), together):
            queues = {n: list(groups[n]) for n in ordered[first : first + together]}
            budget = max(1, self.max_tokens // len(queues))
            while any(queues.values()):
                taken: dict[str, list[Group]] = {n: [] for n in queues}
                for n, queue in queues.items():
                    while queue and (
                        not taken[n] or padded_tokens([*taken[n], queue[0]]) <= budget
                    ):
                        taken[n].append(queue.pop(0))
                # a policy with fewer groups sits later passes out
                yield {n: mine for n, mine in taken.items() if mine}

    def _pack(self, chunk: list[list[Group]], shapes: ShapeBook) -> tuple[Batch, list[list[Place]]]:
        return pack(
            chunk, shapes, context=self.base.cfg.context, row_multiple=self.base.row_multiple
        )

    def refer(self, name: str, config: AdapterConfig, adapter: Any) -> None:
        """Sets the frozen adapter that a policy's reference logprobs are of; without one they are
        the bare base's.

        Raises:
            UserError: an unknown policy, or weights that do not fit their config.
        """
        self._order([name])
        lora_tree.check_fits(adapter, config, self.specs, f"reference of policy {name!r}")
        self._references[name] = config, adapter
        self._resident = None

    def reference(self, name: str) -> tuple[AdapterConfig, Any] | None:
        """The frozen adapter that ``refer`` set for a policy; None where it is compared with the
        bare base.
        """
        self._order([name])
        return self._references.get(name)

    def references(self) -> tuple[Stacks, dict[str, Slot]]:
        """The frozen adapters of the references, and which slot each policy's is; a policy without
        one has the bare base.

        Raises:
            UserError: a policy's loss names a revision that ``refer`` was not given.
        """
        for name, p in self.policies.items():
            if (
                p.loss.needs_reference
                and p.loss.reference not in ("start", "base")
                and name not in self._references
            ):
                raise UserError(
                    f"policy {name!r}: its loss refers to {p.loss.reference!r}, whose adapter was"
                    " not given: call refer()"
                )
        if self._resident is None:
            stacks, slots = lora_tree.stack_adapters(self.specs, self._references)
            self._resident = multihost.replicate(stacks, self.base.mesh), slots
        return self._resident

    def _reference(self, missing: Mapping[str, list[Group]], shapes: ShapeBook) -> None:
        """Fills each ``ref_logp`` that a pass lacks with the reference's logprobs (0 at tokens that
        are no target).
        """
        stacks, all_slots = self.references()
        adapted = sorted((n for n in missing if n in all_slots), key=lambda n: all_slots[n])
        order = adapted + [n for n in missing if n not in all_slots]
        buckets = sorted({all_slots[n].bucket for n in adapted})
        slots = {
            b: np.array([all_slots[n].index for n in adapted if all_slots[n].bucket == b], np.int32)
            for b in buckets
        }
        groups = [missing[n] for n in order]
        # in the shape that training has: nothing more to compile as lengths vary
        batch, places = self._pack(groups, shapes)
        with jax.set_mesh(self.base.mesh):
            used = {b: stacks[b] for b in buckets}
            logp = multihost.to_host(
                step_lib.score(self.base.params, batch, used, slots, cfg=self.base.cfg)
            )
        for chunk, where in zip(groups, places):
            for s, values in _of_sequences(chunk, where, logp, 0.0):
                if s.ref_logp is None:
                    s.ref_logp = values

    def forward_backward(
        self, groups: Mapping[str, Sequence[Group]], shapes: ShapeBook | None = None
    ) -> dict[str, dict[str, float]]:
        """Adds the gradients of each policy's groups to its sum; metrics per policy, summed over
        its tokens.

        Reference logprobs are computed here for policies whose loss needs them and whose sequences
        lack them. Sequences that a sampler drew and that have no ``first_logp`` are given theirs:
        later updates on them are measured by it.

        Args:
            shapes: the book of padded sizes to go by, where results must not depend on what else
                was trained here.
        """
        shapes = shapes or self.shapes
        ordered = self._order(list(groups))
        for name in ordered:
            if not groups[name]:
                raise UserError(
                    f"policy {name!r} has no sequences to train on: leave it out of this update"
                )
            _check_needs(name, self.policies[name].loss, groups[name])
        totals: dict[str, dict[str, float]] = {n: {} for n in ordered}
        routed: dict[str, list[Group]] = {}
        for name in ordered:
            routed[name], masked = mask_unrouted(groups[name])
            if masked:
                totals[name]["unrouted"] = float(masked)
        for live in self._passes(routed, ordered):
            names = list(live)
            if missing := {
                n: g
                for n, g in live.items()
                if self.policies[n].loss.needs_reference and _lacks_reference(g)
            }:
                self._reference(missing, shapes)
            batch, places = self._pack(list(live.values()), shapes)
            custom = losses.functions_of(self.policies[n].loss.kind for n in names)
            coefs, slots = (
                stack_coefs([self.policies[n].loss for n in names], custom),
                self._slot_arrays(names),
            )
            static: dict[str, Any] = {"cfg": self.base.cfg, "remat": self.remat, "custom": custom}
            with jax.set_mesh(self.base.mesh):
                self._state, logp, metrics = step_lib.forward_backward(
                    self.base.params, self.state, batch, coefs, slots, **static
                )
            sampled = any(self.policies[n].loss.samples for n in names)
            logp, metrics = multihost.to_host((logp if sampled else None, metrics))
            for (name, chunk_), where in zip(live.items(), places):
                for s, values in (
                    _of_sequences(chunk_, where, logp, np.nan)
                    if self.policies[name].loss.samples
                    else ()
                ):
                    if s.first_logp is None:
                        s.first_logp = values
            for key, values in metrics.items():
                for name, value in zip(names, values):
                    old = totals[name].get(key, 0.0)
                    totals[name][key] = (
                        max(old, float(value)) if key == "max_gap" else old + float(value)
                    )
        for name in ordered:  # masked sequences are copies
            for s, mine in zip(_sequences(groups[name]), _sequences(routed[name])):
                s.ref_logp, s.first_logp = mine.ref_logp, mine.first_logp
        return {
            name: _of_loss(totals[name], self.policies[name].loss, groups[name]) for name in ordered
        }

    def optim_step(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Applies the accumulated gradients of these policies."""
        ordered = self._order(names)
        self._renew(ordered)
        with jax.set_mesh(self.base.mesh):
            self._state, metrics = step_lib.optim_step(self.state, self._slot_arrays(ordered))
        host = multihost.to_host(metrics)
        return {name: {key: float(host[key][i]) for key in host} for i, name in enumerate(ordered)}

    def update(
        self, groups: Mapping[str, Sequence[Group]], shapes: ShapeBook | None = None
    ) -> dict[str, dict[str, float]]:
        """One optimizer update of every named policy from its groups; mean metrics per policy."""
        totals = self.forward_backward(groups, shapes)
        steps = self.optim_step(list(groups))
        return {name: summarise(totals[name]) | steps[name] for name in groups}

    def adapter(self, name: str) -> Any:
        """One policy's adapter on the host, at its true rank and targets."""
        return jax.tree.map(np.asarray, jax.device_get(self.snapshot(name)))

    def snapshot(self, name: str) -> Any:
        """``adapter`` on the devices: arrays of its own, which later updates leave alone, whole in
        every process.

        Their copies to the host are under way when it returns, so that ``jax.device_get`` in
        another thread only waits.
        """
        self._order([name])
        config, slot = self.policies[name].adapter, self.slots[name]
        arrays = multihost.whole(
            _read(
                self.state[slot.bucket].adapters,
                np.int32(slot.index),
                cfg=self.base.cfg,
                adapter=config,
            )
        )
        for array in jax.tree.leaves(arrays):
            array.copy_to_host_async()
        return arrays

    def load_adapter(self, name: str, adapter: Any) -> None:
        """Starts a policy from given weights, with fresh optimizer state. They are its reference
        where that is ``start``.

        The arrays of its stack are donated, as by an update: what held the old ones must read
        ``stacks`` again.

        Raises:
            UserError: an unknown policy, or weights that do not fit its config.
        """
        self._order([name])
        lora_tree.check_fits(adapter, self.policies[name].adapter, self.specs, f"policy {name!r}")
        p = self.policies[name]
        with jax.set_mesh(self.base.mesh):
            self._start(p, adapter)
        if p.loss.needs_reference and p.loss.reference == "start":
            self.refer(name, p.adapter, adapter)


def _sequences(groups: Sequence[Group]) -> list[TrainSequence]:
    return [s for g in groups for s in g.sequences]


def _of_sequences(
    groups: Sequence[Group], places: Sequence[Place], values_PBM: np.ndarray, other: float
) -> Iterator[tuple[TrainSequence, list[float]]]:
    """Each sequence of a packed chunk and its values, one a token, ``other`` at tokens that are no
    target.
    """
    for s, place in zip(_sequences(groups), places, strict=True):
        values = np.full(len(s.tokens), other, np.float32)
        values[np.flatnonzero(s.weights)] = values_PBM[
            place.policy, place.row, place.start : place.start + place.count
        ]
        yield s, values.tolist()


def _lacks_reference(groups: Sequence[Group]) -> bool:
    return any(s.ref_logp is None for g in groups for s in g.sequences)


def _check_needs(name: str, loss: LossConfig, groups: Sequence[Group]) -> None:
    """Refuses groups that lack what the loss is computed from: it would train nothing, or something
    else.

    Raises:
        UserError: naming what is missing.
    """
    what = {"advantages": "advantages", "old_logp": "old_logp, the sampler's log-probabilities"}
    for field in sorted(loss.needs & set(what)):
        for i, s in enumerate(_sequences(groups)):
            if getattr(s, field) is None:
                raise UserError(
                    f"policy {name!r}: loss {loss.kind!r} needs"
                    f" {' and '.join(what[f] for f in sorted(loss.needs & set(what)))}, and"
                    f" sequence {i} has no {field}: train on scored completions (mint_jax.groups"
                    " makes groups of them), or give the policy loss 'cross_entropy' to learn from"
                    " texts"
                )
    if "pairs" in loss.needs and not all(g.pair_weight for g in groups):
        raise UserError(
            f"policy {name!r}: loss {loss.kind!r} needs pairs of a chosen and a rejected answer,"
            " and a group has no pair_weight: give rows with prompt, chosen and rejected, or the"
            " policy another loss"
        )
    if "pairs" not in loss.needs and any(g.pair_weight for g in groups):
        raise UserError(
            f"policy {name!r}: loss {loss.kind!r} has no use for the pairs of these groups: give"
            " the policy loss 'dpo'"
        )


def _of_loss(
    totals: dict[str, float], loss: LossConfig, groups: Sequence[Group]
) -> dict[str, float]:
    """The metrics that mean something for a loss and its data."""
    drawn = loss.samples and all(s.old_logp is not None for s in _sequences(groups))
    means = {
        "kl_sum": loss.needs_reference,
        "clipped_sum": loss.kind in losses.CLIPPING,
        "masked_sum": loss.is_banded,
        "gap_sum": drawn,
        "max_gap": drawn,
    }
    means |= dict.fromkeys(
        ("pairs", "margin_sum", "chosen_sum", "rejected_sum", "preferred_sum"),
        "pairs" in loss.needs,
    )
    return {name: value for name, value in totals.items() if means.get(name, True)}


def summarise(totals: dict[str, float]) -> dict[str, float]:
    """Sums over tokens and pairs -> means."""
    of_pairs, as_they_are = (
        ("margin", "preferred", "chosen", "rejected"),
        (
            "loss",
            "tokens",
            "unrouted",
            "max_gap",
        ),
    )
    out = {name: totals[name] for name in as_they_are if name in totals}
    for key, total in totals.items():
        if key.endswith("_sum"):
            name = key.removesuffix("_sum")
            out[name] = total / max(totals["pairs" if name in of_pairs else "tokens"], 1.0)
    return out
