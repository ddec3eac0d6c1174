"""Training of many policies over one resident base, for recipes, the Python API and the service.

A step computes blocks of several requests in one pass and adds each block's gradient to its
policy's sum; an update applies these sums. ``update`` trains named policies on groups, with the
losses and optimizers of their configs and shapes that follow from the data. ``step`` and ``optim``
compute requests of policies that join, leave and change while others train; with declared slots and
shapes nothing is compiled for them. One thread owns a ``Trainer``.
"""

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mint_jax import multihost
from mint_jax import params as params_lib
from mint_jax.compiling import Programs
from mint_jax.data.buckets import ShapeBook
from mint_jax.errors import UserError, choice
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import BASIS, AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.train import blocks as blocks_lib
from mint_jax.train import host_state, losses, metrics
from mint_jax.train import step as step_lib
from mint_jax.train.batch import Group, by_sequence, data_of
from mint_jax.train.blocks import DatumBlock, Fitted, TrainRequest
from mint_jax.train.config import (
    CPU_SHAPES,
    SHAPES,
    BlockShape,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
)
from mint_jax.train.host_state import HostState
from mint_jax.train.losses import LossFn, coefs_of, stack_coefs
from mint_jax.train.metrics import summarise
from mint_jax.train.references import References
from mint_jax.train.slots import Slots
from mint_jax.train.state import stack_hyper
from mint_jax.train.step_times import StepTimes

ALL_TARGETS = (lora_tree.ALL_LINEAR, "unembed")
# Counters that are reported as 0 from the start.
COUNTS = "steps tokens padded_tokens slots_written slots_read spills_written spills_read"


class Step(NamedTuple):
    """One step, and the seconds until its results were on the host."""

    shape: BlockShape
    blocks: list[DatumBlock]
    seconds: float


class Trainer(Slots):
    """The policies in training and what is computed for them.

    Args:
        max_tokens: padded tokens of one pass of ``forward_backward``; larger updates accumulate
            over several passes. None is 16384 on CPUs and 8192 on accelerators.
        remat: a key of ``transformer.REMAT``.
        slots, targets, experts, host_bytes, folder: see ``Slots``.
        shapes: declared shapes of ``step``; none uses ``CPU_SHAPES`` or ``SHAPES``.

    Attributes:
        shapes: padded sizes of the passes so far.
        declared: shapes of ``step``, smallest first.
        compiled: programs of ``programs.programs`` that are ready, while others compile in the
            background; None compiles each program at its first call.
    """

    def __init__(
        self,
        base: Base,
        policies: Sequence[PolicyConfig] = (),
        max_tokens: int | None = None,
        remat: str = "names",
        *,
        slots: Mapping[int, int] | None = None,
        targets: Sequence[str] = ALL_TARGETS,
        experts: str = "each",
        shapes: Sequence[BlockShape] = (),
        host_bytes: int = 4 << 30,
        folder: Path | None = None,
    ):
        if remat not in transformer.REMAT:
            raise choice("remat", remat, transformer.REMAT)
        if slots is not None and (count := multihost.count()) > 1:
            raise UserError(
                f"live training runs in one process, here are {count}: start one process over all"
                " devices, or train by a job"
            )
        names = [p.name for p in policies]
        if len(set(names)) != len(names):
            raise UserError(f"policy names {names} are not distinct: rename one")
        is_on_cpu = base.mesh.devices.flat[0].platform == "cpu"
        shapes = shapes or (CPU_SHAPES if is_on_cpu else SHAPES)
        if any(min(shape) < 1 for shape in shapes) or all(shape.width > 1 for shape in shapes):
            raise UserError(
                f"shapes is {list(shapes)}; expected sizes of at least 1, one of them for plain"
                " targets"
            )
        super().__init__(base, slots, targets, experts, host_bytes, folder)
        # The mesh splits rows, so a shape needs enough blocks for every part of the mesh.
        even = [
            shape._replace(blocks=_round_up(shape.blocks, shape.rows, base.row_multiple))
            for shape in shapes
        ]
        self.declared = tuple(sorted(dict.fromkeys(even), key=lambda s: s.size))
        # On an H100 8192 tokens are 3 % slower than 16384, with a smaller peak of memory.
        self.max_tokens = max_tokens or (16384 if is_on_cpu else 8192)
        self.remat = remat
        self.policies: dict[str, PolicyConfig] = {}
        self.shapes = ShapeBook()
        self.references = References(base, self.policies)
        self.counts.update(dict.fromkeys(COUNTS.split(), 0))
        self.times = StepTimes()
        self._compiled_variants = set[tuple[Any, ...]]()
        self.compiled: Programs | None = None
        self.add(*policies)

    # -- policies with a config

    def add(self, *policies: PolicyConfig) -> None:
        """Adds policies with adapters from their seeds. Raises ``UserError`` if a name is taken or
        the base does not support a rank or target.
        """
        for p in policies:
            lora_tree.check_dropout(self.specs, p.adapter, p.dropout)
        made = {p.name: (p.adapter, p.seed, p.init) for p in policies}
        self.join_all({name: host_state.fresh(self.specs, *how) for name, how in made.items()})
        self.policies.update({p.name: p for p in policies})

    def leave(self, name: str) -> None:
        super().leave(name)
        self.policies.pop(name, None)
        self.references.forget(name)

    def load_adapter(self, name: str, adapter: Any) -> None:
        """Starts a policy from given weights with fresh optimizer state; they become its reference
        if that is ``start``. Donates the arrays of its stack: read ``stacks`` again afterwards.
        Raises ``UserError`` for weights that do not fit their config.
        """
        [policy] = self._configs([name])
        lora_tree.check_fits(adapter, policy.adapter, self.specs, f"policy {name!r}")
        self.replace(name, HostState.of(policy.adapter, adapter))
        if policy.loss.needs_reference and policy.loss.reference == "start":
            self.refer(name, policy.adapter, adapter)

    def refer(self, name: str, config: AdapterConfig, adapter: Any) -> None:
        """Sets the frozen adapter of a policy's reference, by default the bare base. Raises
        ``UserError`` for weights that do not fit their config.
        """
        self._configs([name])
        self.references.put(name, config, adapter)

    def _configs(self, names: Sequence[str]) -> list[PolicyConfig]:
        if not names:
            raise UserError("no policies were named: give at least one")
        for name in names:
            self._known(name)
        return [self.policies[name] for name in names]

    def forward_backward(
        self, groups: Mapping[str, Sequence[Group]], shapes: ShapeBook | None = None
    ) -> dict[str, dict[str, float]]:
        """Adds the gradients of each policy's groups to its sum; returns metrics by policy, summed
        over tokens.

        Missing reference logprobs are computed here if a policy's loss needs them. Sampled
        sequences without ``first_logp`` get theirs, against which later updates are measured.
        ``shapes`` are padded sizes to use, if results must not depend on earlier calls.
        """
        book = self.shapes if shapes is None else shapes
        configs = {p.name: p for p in self._configs(list(groups))}
        for name, policy in configs.items():
            metrics.check_needs(name, policy.loss, groups[name])
        custom = losses.functions_of(p.loss.kind for p in configs.values())
        works: dict[str, TrainRequest] = {}
        for name in sorted(configs, key=self.slots.__getitem__):  # as the blocks of a step
            data = data_of(groups[name], self.base.cfg.context)
            work = TrainRequest(name, data, coefs_of(configs[name].loss, custom))
            work.dropout, work.seed = configs[name].dropout, configs[name].seed
            works[name] = work
        for blocks in blocks_lib.passes(list(works.values()), self.max_tokens):
            fitted = blocks_lib.fit(blocks, book, self.base.row_multiple)
            self.references.score([b for b in blocks if _lacks_reference(configs, b)], fitted)
            self._compute(blocks, fitted, custom)
        out = {}
        for name, policy in configs.items():
            for group, datum, logp in zip(groups[name], works[name].data, works[name].logprobs):
                _keep_logprobs(group, policy.loss, datum, logp)
            out[name] = metrics.of_loss(works[name], policy.loss, groups[name])
        return out

    def optim_step(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Applies accumulated gradients, with the optimizers of the policies' configs."""
        return self.optim({policy.name: policy.optimizer for policy in self._configs(names)})

    def update(
        self, groups: Mapping[str, Sequence[Group]], shapes: ShapeBook | None = None
    ) -> dict[str, dict[str, float]]:
        """Runs one optimizer update of every named policy; returns mean metrics by policy."""
        totals = self.forward_backward(groups, shapes)
        steps = self.optim_step(list(groups))
        return {name: summarise(totals[name]) | steps[name] for name in groups}

    def gradient(self, name: str) -> Any:
        """Returns the gradients accumulated since a policy's last update, as ``adapter`` does."""
        member = self._known(name)
        one = host_state.to_host(self._read_one(member), member.config, self.specs, ["grad"])
        return params_lib.nest(dict(one.parts["grad"]))

    def gradients(self, groups: Mapping[str, Sequence[Group]]) -> dict[str, Any]:
        """Returns the gradients of these groups alone, by policy; the state is unchanged."""
        self._configs(list(groups))
        before = {name: (self._read_one(m := self._members[name]), m.version) for name in groups}
        try:
            for name, (one, _) in before.items():
                empty = dataclasses.replace(one, grad_sum=jax.tree.map(np.zeros_like, one.grad_sum))
                self._write(self._members[name], empty)
            self.forward_backward(groups)
            return {name: self.gradient(name) for name in before}
        finally:
            for name, (one, version) in before.items():
                self._write(self._members[name], one)
                self._members[name].version = version

    # -- requests

    def choose(
        self, works: Sequence[TrainRequest], bound_s: float | None = None
    ) -> tuple[BlockShape, list[DatumBlock]]:
        """Returns the next step's shape and blocks, always with some of the first request: the most
        tokens a second among shapes of at most ``bound_s`` measured seconds, or else the fastest
        shape. Raises ``UserError`` if the first has no data left, or no shape fits.
        """
        first = works[0]
        if not first.left:
            raise UserError(
                f"the request of policy {first.policy!r} is complete: it has no data left"
            )
        alike, names = [], set[str]()
        for work in works:
            if work.left and self._kind(work) == self._kind(first):
                if len(names) < self.capacity[self._known(first.policy).bucket]:
                    names.add(work.policy)
                alike += [work] if work.policy in names else []
        found = []
        for shape in self.declared:
            if (shape.width > 1) == (first.width > 1) and self._has(first, shape):
                made = blocks_lib.cut([work for work in alike if work.width <= shape.width], shape)
                if any(block.work is first for block in made):
                    found.append((self.times.seconds(shape, first.backward), shape, made))
        if not found:
            raise UserError(
                f"no step shape fits the remaining data of policy {first.policy!r}: call"
                " blocks.check first"
            )
        cheap = [one for one in found if bound_s is not None and one[0] <= bound_s]
        if bound_s is not None and not cheap:
            cheap = [min(found, key=lambda one: one[0])]
        _, shape, made = max(cheap or found, key=lambda one: blocks_lib.used(one[2]) / one[0])
        return shape, made

    def _kind(self, work: TrainRequest) -> tuple[Any, ...]:
        return self._known(work.policy).bucket, work.backward, work.width > 1, work.routed

    def can_start(self, work: TrainRequest) -> bool:
        """Returns True if a compiled step takes some of a request's data, or has one compiled."""
        if self.compiled is None or work.policy not in self or not work.left:
            return True
        shortest = min(work.data[i].tokens.size for i in work.left)
        alike = (s for s in self.declared if (s.width > 1) == (work.width > 1))
        fit = [s for s in alike if s.width >= work.width and s.tokens >= shortest]
        if not fit or any(self._has(work, shape) for shape in fit):
            return True
        return self.compiled.want(self._key(work, fit[0]))

    def can_move(self) -> bool:
        """Returns True if policies can be loaded into slots and updated without compiling."""
        return self.compiled is None or all(
            self.compiled.has(("update", bucket, "adamw")) for bucket in self.capacity
        )

    def can_update(self, name: str, config: OptimizerConfig) -> bool:
        """Returns True if a policy can be updated without compiling, or has that compiled."""
        if self.compiled is None or name not in self:
            return True
        return self.compiled.want(("update", self._known(name).bucket, config.kind))

    @property
    def is_ready(self) -> bool:
        """True if a policy of each rank can be trained by some compiled step; from any thread."""
        if (compiled := self.compiled) is None:
            return True
        plain = [shape for shape in self.declared if shape.width == 1]
        return self.can_move() and all(
            any(compiled.has(("step", bucket, shape, True, False)) for shape in plain)
            for bucket in self.capacity
        )

    def _key(self, work: TrainRequest, shape: BlockShape) -> tuple[Any, ...]:
        return "step", self._known(work.policy).bucket, shape, work.backward, work.routed

    def _has(self, work: TrainRequest, shape: BlockShape) -> bool:
        return self.compiled is None or self.compiled.has(self._key(work, shape))

    def step(self, works: Sequence[TrainRequest], bound_s: float | None = None) -> Step:
        """Computes a part of these requests (see ``choose``) and stores the results in them.
        Gradients add to those of their policies.
        """
        shape, made = self.choose(works, bound_s)
        self.load([block.work.policy for block in made])
        seconds = self._compute(made, Fitted(shape, shape.tokens, 0))
        self.times.add(shape, made[0].work.backward, seconds)
        return Step(shape, made, seconds)

    def _compute(
        self, blocks: Sequence[DatumBlock], fitted: Fitted, custom: tuple[LossFn, ...] = ()
    ) -> float:
        """Runs one pass over blocks, which are in the order of their slots' buckets, and stores the
        results in their requests. Returns the seconds of the program and its transfers.
        """
        shape, backward = fitted.shape, blocks[0].work.backward
        # One program whichever policies are in the pass.
        drops = backward and any(policy.dropout for policy in self.policies.values())
        batch, spans = blocks_lib.fill(blocks, *fitted, drops)
        members = [self._members[block.work.policy] for block in blocks]
        numbers: dict[int, list[Any]] = {}
        for member in members:
            numbers.setdefault(member.bucket, []).append(member.slot)
        # Padding is of the last bucket, in a slot out of range.
        last = members[-1].bucket
        numbers[last] += [self.capacity[last]] * (shape.blocks - len(blocks))
        slots = {bucket: np.array(own, np.int32) for bucket, own in numbers.items()}
        coefs = stack_coefs([block.work.coefs for block in blocks], shape.blocks)
        params, cfg = self.base.params, self.base.cfg
        args: tuple[Any, ...]
        static: dict[str, Any]
        if backward:
            program, static = step_lib.forward_backward, {"remat": self.remat, "custom": custom}
            static["entropy_gradient"] = any(block.work.coefs.entropy for block in blocks)
            args = params, {bucket: self._state[bucket] for bucket in slots}, batch, coefs, slots
        else:
            program, static = step_lib.score, {}
            adapters = {bucket: self._state[bucket].adapters for bucket in slots}
            args = params, batch, coefs, adapters, slots
        with jax.set_mesh(self.base.mesh):
            variant = fitted, *static.items(), tuple(slots), jax.tree.structure(batch)
            if variant not in self._compiled_variants:
                # Timed with its compilation, a first call would make the shape look slow (79 ms
                # instead of 14), and it would not be chosen again for ``step_times.STALE_S``.
                program.lower(*args, cfg=cfg, **static).compile()
                self._compiled_variants.add(variant)
            began = time.perf_counter()
            if backward:
                new, logp, found = program(*args, cfg=cfg, **static)
                self._state = self._state | new
            else:
                logp, loss = program(*args, cfg=cfg)
                found = {"loss": loss}
            logp, found = multihost.to_host((logp, found))
        seconds = time.perf_counter() - began
        for member in members:
            member.pending |= backward
        blocks_lib.collect(spans, logp.reshape(*shape[:2], -1, shape.width), found)
        self.counts["steps"] += 1
        self.counts["tokens"] += blocks_lib.used(blocks)
        self.counts["padded_tokens"] += shape.size
        return seconds

    def optim(self, updates: Mapping[str, OptimizerConfig]) -> dict[str, dict[str, float]]:
        """Updates each named policy from its gradients and clears these. Returns ``grad_norm``
        (before clipping), ``learning_rate`` and ``skipped`` by policy; a policy whose gradient is
        not finite keeps its state, and ``skipped`` is 1.
        """
        out: dict[str, dict[str, float]] = {}
        groups = collections.defaultdict[tuple[int, str], list[str]](list)
        for name, config in updates.items():
            groups[self._known(name).bucket, config.kind].append(name)
        for (bucket, kind), queue in groups.items():
            count = self.capacity[bucket]
            while queue:
                names, queue = queue[:count], queue[count:]
                at, slots = self.load(names), np.full(count, count, np.int32)
                slots[: len(names)] = [at[name].index for name in names]
                hyper = stack_hyper([updates[name] for name in names], count)
                kinds = [self._known(name).config.kind for name in names]
                hyper.b_ratio[: len(names)][np.equal(kinds, BASIS)] = 0.0
                with jax.set_mesh(self.base.mesh):
                    new, found = step_lib.optim_step(
                        {bucket: self._state[bucket]}, {bucket: slots}, {bucket: hyper}, kind
                    )
                    self._state = self._state | new
                    host = multihost.to_host(found)
                for i, name in enumerate(names):
                    self._updated(name)
                    out[name] = {key: float(values[i]) for key, values in host.items()}
        return {name: out[name] for name in updates}


def _lacks_reference(configs: Mapping[str, PolicyConfig], block: DatumBlock) -> bool:
    return configs[block.work.policy].loss.needs_reference and any(
        datum.ref_logp is not None and np.isnan(datum.ref_logp).any() for datum in block.data
    )


def _keep_logprobs(group: Group, loss: LossConfig, datum: Any, logp: Any) -> None:
    """Stores computed log-probabilities in the sequences that lack them."""
    if loss.samples:
        for s, values in by_sequence(group, datum, logp, np.nan):
            s.first_logp = values if s.first_logp is None else s.first_logp
    if loss.needs_reference:
        for s, values in by_sequence(group, datum, datum.ref_logp, 0.0):
            s.ref_logp = values if s.ref_logp is None else s.ref_logp


def _round_up(blocks: int, rows: int, parts: int) -> int:
    """Returns the smallest number >= ``blocks`` whose rows split into ``parts`` equal parts."""
    return next(n for n in range(blocks, blocks + parts) if n * rows % parts == 0)
