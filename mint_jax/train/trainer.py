"""Training of many policies over one resident base: names to slots, groups to batches, batches to
updates.

The host object that jobs and benchmarks share. It owns the training state only: no files, no
prompts, no rewards.
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
    TargetSpan,
    TrainSequence,
    mask_unrouted,
    pack,
    padded_tokens,
)
from mint_jax.train.config import KL_KINDS, LossConfig, PolicyConfig
from mint_jax.train.host_state import HostState
from mint_jax.train.losses import LossCoefs, LossFn
from mint_jax.train.state import Hyper, State, TrainStack


def _coefs(loss: LossConfig, custom: tuple[LossFn, ...]) -> LossCoefs:
    """Returns a loss as coefficients, for a program with these registered losses."""
    beta = loss.dro_beta if loss.kind == "dro" else loss.dpo_beta
    kinds = losses.index_of(loss.kind, custom), KL_KINDS.index(loss.kl_kind)
    bounds = 1.0 - loss.low, 1.0 + loss.clip_high
    return LossCoefs(kinds[0], *bounds, kinds[1], loss.kl, loss.band_low, loss.band_high, beta)  # type: ignore[arg-type]


def stack_coefs(configs: Sequence[LossConfig], custom: tuple[LossFn, ...] = ()) -> LossCoefs:
    """Returns the ``LossCoefs`` of several policies, ``[P]`` arrays."""
    rows = [_coefs(c, custom) for c in configs]
    kinds = ("kind", "kl_kind")
    columns = (
        np.array([getattr(row, name) for row in rows], np.int32 if name in kinds else np.float32)
        for name in LossCoefs._fields
    )
    return LossCoefs(*columns)  # type: ignore[arg-type]


# A version is a unique number of one policy's weights in this process. Unlike a digest it is known
# without a copy to the host.
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
    """Runs ``state.start`` with given weights, or with fresh ones if ``weights`` is a seed.

    There is one program for each rank and set of targets. One program for all policies took 0.7 s a
    policy to compile.
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
    """Copies ``stack`` to the first slots of a larger stack; leaves that it lacks stay zero."""
    present = dict(jax.tree_util.tree_leaves_with_path(stack))

    def put(path: Any, new: jax.Array) -> jax.Array:
        if (old := present.get(path)) is None:
            return new
        return jax.lax.dynamic_update_slice(new, old, (0,) * new.ndim)

    return lora_tree.constrain(
        jax.tree_util.tree_map_with_path(put, larger), transformer.abstract(cfg)
    )


@functools.partial(jax.jit, static_argnames=("index", "cfg"))
def _without(stack: TrainStack, index: int, cfg: ModelConfig) -> TrainStack:
    """Returns the stack without one slot."""
    smaller = jax.tree.map(lambda x: jnp.delete(x, index, state_lib.slot_axis(x)), stack)
    return lora_tree.constrain(smaller, transformer.abstract(cfg))


class Trainer:
    """The policies in training and their state on the devices.

    Args:
        base: the resident base; read only.
        policies: names must differ.
        max_tokens: tokens of one forward and backward pass, with rows padded to the longest of a
            policy; larger updates accumulate over several passes.
        remat: rematerialisation of the backward pass, a key of ``transformer.REMAT``.

    Attributes:
        versions: version of each policy's adapter; renewed whenever it may have changed.

    Raises:
        UserError: duplicate names, or a rank or target that the base does not support.
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
        # Stacks and slots of the references, made on first use.
        self._resident: tuple[Stacks, dict[str, Slot]] | None = None
        with jax.set_mesh(base.mesh):
            self.state = _empty(cfg=base.cfg, adapters=tuple(p.adapter for p in policies))
            for p in policies:
                self._start(p, np.uint32(p.seed & 0xFFFFFFFF))

    @property
    def state(self) -> State:
        """The training state. Setting it renews all versions."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._renew(self.policies)

    def _renew(self, names: Iterable[str]) -> None:
        self.versions |= {name: next(_versions) for name in names}

    def join(self, policy: PolicyConfig) -> None:
        """Adds a policy; the others keep their state. Only the stack of its rank bucket is
        enlarged, and only programs with that stack are compiled again.

        Raises:
            UserError: the name is taken, or a rank or target that the base does not support.
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
        """Removes a policy and frees its slot. The others keep their state; later slots of the
        bucket move down by one.

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

    def read_state(self, name: str) -> HostState:
        """Returns a host copy of a policy's state: adapter, moments, accumulated gradients,
        counters.
        """
        return one_slot.to_host(self._one(name), self.policies[name].adapter, self.specs)

    def restore(self, name: str, saved: HostState) -> None:
        """Restores a policy's state from ``read_state``, with the same bits.

        Raises:
            UserError: an unknown policy, or a state that does not fit its config.
        """
        self._order([name])
        lora_tree.check_fits(
            saved.adapter(), self.policies[name].adapter, self.specs, f"policy {name!r}"
        )
        self._put(name, one_slot.padded(saved, self.state[self.slots[name].bucket]))

    def gradient(self, name: str) -> Any:
        """Returns the gradients accumulated since a policy's last update, as a tree like
        ``adapter``.
        """
        one = one_slot.to_host(self._one(name), self.policies[name].adapter, self.specs, ["grad"])
        return params_lib.nest(dict(one.parts["grad"]))

    def gradients(
        self, groups: Mapping[str, Sequence[Group]]
    ) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        """Returns the gradients of these groups alone and their metrics, by policy; the state is
        unchanged.
        """
        before = {name: self._one(name) for name in self._order(list(groups))}
        versions = dict(self.versions)
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
        """Puts a policy into its slot, with an adapter or a fresh one from a seed."""
        at, config = self.slots[policy.name], policy.adapter
        stack, numbers = self.state[at.bucket], Hyper.of(policy.optimizer)
        shape = AdapterConfig(config.rank, targets=config.targets)  # scale is data
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
        """Adapters for the sampling engine: the arrays that training updates, without a copy."""
        return {bucket: stack.adapters for bucket, stack in self.state.items()}

    def _order(self, names: Sequence[str]) -> list[str]:
        """Returns policy names in block order: by bucket, then slot."""
        if not names:
            raise UserError("no policies were named: give at least one")
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
        """Yields micro-batches with groups of some policies, within ``max_tokens`` if single groups
        fit.

        A policy for which there is no room waits for a later pass. With every policy in every pass,
        each pass would compute and add up the gradients of all. The number of policies in a pass is
        a power of two, so that varying lengths need few programs.
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
                # Policies with fewer groups skip the later passes.
                yield {n: chunk for n, chunk in taken.items() if chunk}

    def _pack(
        self, chunk: list[list[Group]], shapes: ShapeBook
    ) -> tuple[Batch, list[list[TargetSpan]]]:
        return pack(
            chunk, shapes, context=self.base.cfg.context, row_multiple=self.base.row_multiple
        )

    def refer(self, name: str, config: AdapterConfig, adapter: Any) -> None:
        """Sets the frozen adapter for a policy's reference logprobs; the default is the bare base.

        Raises:
            UserError: an unknown policy, or weights that do not fit their config.
        """
        self._order([name])
        lora_tree.check_fits(adapter, config, self.specs, f"reference of policy {name!r}")
        self._references[name] = config, adapter
        self._resident = None

    def reference(self, name: str) -> tuple[AdapterConfig, Any] | None:
        """Returns the frozen adapter set by ``refer``; None for the bare base."""
        self._order([name])
        return self._references.get(name)

    def references(self) -> tuple[Stacks, dict[str, Slot]]:
        """Returns the stacks of all reference adapters, and the slot of each policy that has one.

        Raises:
            UserError: a policy's loss names a revision whose adapter ``refer`` was not given.
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
        """Computes missing ``ref_logp`` of a pass from the reference (0 at tokens that are not
        targets).
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
        # Same shape as the training pass, so that varying lengths compile nothing more.
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
        """Adds the gradients of each policy's groups to its sum; returns metrics by policy, summed
        over tokens.

        Missing reference logprobs are computed here if a policy's loss needs them. Sampled
        sequences without ``first_logp`` get theirs, against which later updates are measured.

        Args:
            shapes: padded sizes to use, if results must not depend on earlier calls.
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
            for s, copy in zip(_sequences(groups[name]), _sequences(routed[name])):
                s.ref_logp, s.first_logp = copy.ref_logp, copy.first_logp
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
        """Runs one optimizer update of every named policy; returns mean metrics by policy."""
        totals = self.forward_backward(groups, shapes)
        steps = self.optim_step(list(groups))
        return {name: summarise(totals[name]) | steps[name] for name in groups}

    def adapter(self, name: str) -> Any:
        """Returns one policy's adapter on the host, at its true rank and targets."""
        return jax.tree.map(np.asarray, jax.device_get(self.snapshot(name)))

    def snapshot(self, name: str) -> Any:
        """Returns a copy of one policy's adapter on the devices, replicated to every process. Later
        updates do not change it.

        Copies to the host have been started, so ``jax.device_get`` in another thread only waits.
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
        """Starts a policy from given weights with fresh optimizer state. They become its reference
        if that is ``start``.

        Donates the arrays of its stack, as an update does: read ``stacks`` again afterwards.

        Raises:
            UserError: an unknown policy, or weights that do not fit their config.
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
    groups: Sequence[Group], places: Sequence[TargetSpan], values_PBM: np.ndarray, other: float
) -> Iterator[tuple[TrainSequence, list[float]]]:
    """Yields each sequence of a packed chunk with its values, one per token, ``other`` at tokens
    that are not targets.
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
    """Raises if groups lack inputs of the loss, which would then train nothing or something else.

    Raises:
        UserError: names the missing inputs.
    """
    what = {"advantages": "advantages", "old_logp": "old_logp, the sampler's log-probabilities"}
    for field in sorted(loss.needs & set(what)):
        for i, s in enumerate(_sequences(groups)):
            if getattr(s, field) is None:
                raise UserError(
                    f"policy {name!r}: loss {loss.kind!r} needs"
                    f" {' and '.join(what[f] for f in sorted(loss.needs & set(what)))}, and"
                    f" sequence {i} has no {field}: train on scored completions (see"
                    " mint_jax.groups), or use loss 'cross_entropy' to train on texts"
                )
    if "pairs" in loss.needs and not all(g.pair_weight for g in groups):
        raise UserError(
            f"policy {name!r}: loss {loss.kind!r} needs pairs of a chosen and a rejected answer,"
            " and a group has no pair_weight: give rows with prompt, chosen and rejected, or"
            " choose another loss"
        )
    if "pairs" not in loss.needs and any(g.pair_weight for g in groups):
        raise UserError(
            f"policy {name!r}: loss {loss.kind!r} does not use the pairs of these groups: choose"
            " loss 'dpo'"
        )


def _of_loss(
    totals: dict[str, float], loss: LossConfig, groups: Sequence[Group]
) -> dict[str, float]:
    """Returns the metrics that are meaningful for a loss and its data."""
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
    """Converts sums over tokens and pairs to means."""
    of_pairs = ("margin", "preferred", "chosen", "rejected")
    as_they_are = ("loss", "tokens", "unrouted", "max_gap")
    out = {name: totals[name] for name in as_they_are if name in totals}
    for key, total in totals.items():
        if key.endswith("_sum"):
            name = key.removesuffix("_sum")
            out[name] = total / max(totals["pairs" if name in of_pairs else "tokens"], 1.0)
    return out
