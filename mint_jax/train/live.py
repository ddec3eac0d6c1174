"""Live training: policies join, leave and change while others train, and nothing is compiled for
it.

Everything that varies is data. The programs are one for each declared shape (``BlockShape``), and
one each to write and read a slot of each declared rank. A policy of a rank in between uses the next
larger slot, padded with zeros that stay zero. The state of an idle policy is in its slot, in host
memory or in a file. It is loaded into a slot when something is computed for it; the least recently
used policy is evicted.

One thread owns a ``Live`` and decides what is computed next (``service/loop.py``).

Axes: S slots, P blocks, B rows, T tokens, K targets of a position.
"""

import collections
import dataclasses
import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mint_jax import multihost
from mint_jax.compiling import Program, Programs, abstract
from mint_jax.errors import UserError, choice
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, Slot
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.config import ModelConfig
from mint_jax.train import blocks as blocks_lib
from mint_jax.train import one_slot
from mint_jax.train import state as state_lib
from mint_jax.train import step as step_lib
from mint_jax.train.blocks import DatumBlock, TrainRequest
from mint_jax.train.config import CPU_SHAPES, KINDS, SHAPES, BlockShape, OptimizerConfig
from mint_jax.train.host_state import PARTS, HostState, SpilledState
from mint_jax.train.losses import LossCoefs
from mint_jax.train.state import Hyper, State
from mint_jax.train.step_times import StepTimes

log = logging.getLogger("mint_jax.train")
SPILL_RETRY_S = 5.0  # seconds until the disk is tried again after a failed write
# Counters that are reported as 0 from the start.
COUNTS = (
    "steps",
    "tokens",
    "padded_tokens",
    "slots_written",
    "slots_read",
    "spills_written",
    "spills_read",
)
NO_LOSS = LossCoefs(KINDS.index("cross_entropy"), 0.0, np.inf, 0, 0.0, 0.0, np.inf, 0.0)  # type: ignore[arg-type]


def shapes_for(mesh: Mesh) -> tuple[BlockShape, ...]:
    """Returns the default step shapes on a mesh's devices."""
    return CPU_SHAPES if mesh.devices.flat[0].platform == "cpu" else SHAPES


class StateLost(UserError):
    """A policy's state cannot be read from its file.

    Attributes:
        policy: name of the policy.
    """

    def __init__(self, policy: str, reason: Exception):
        super().__init__(
            f"the state of policy {policy!r} cannot be read ({reason}): load a checkpoint into it"
        )
        self.policy = policy


class Step(NamedTuple):
    """One step: its shape, its blocks, and the seconds until its results were on the host."""

    shape: BlockShape
    blocks: list[DatumBlock]
    seconds: float


@dataclasses.dataclass(eq=False)
class _TrainedPolicy:
    config: AdapterConfig
    bucket: int
    off_device: HostState | SpilledState | None  # state off the device; None while it is in a slot
    slot: int | None = None
    pending: bool = False  # has gradients that no update has used
    used: int = 0


class Live:
    """The policies in training, wherever their state is.

    Args:
        base: the resident base; read only.
        slots: number of device slots by rank bucket, a power of two.
        targets: projections that policies may adapt; every slot has room for all of them.
        shapes: declared step shapes; none uses ``shapes_for``. Blocks are added until a mesh splits
            their rows evenly.
        remat: rematerialisation of the backward pass, a key of ``transformer.REMAT``.
        host_bytes: limit on states in host memory; beyond it the least recently used ones are
            written to files.
        folder: directory of these files; None keeps all states in memory.

    Attributes:
        counts: steps, tokens (with and without padding), slots written and read, states written to
            files and read back.
        times: measured seconds of a step by shape.
        compiled: programs of ``programs`` that are ready, while others compile in the background;
            None compiles each program at its first call.

    Raises:
        UserError: a bucket that is not a power of two, no shape for plain targets, a target that
            the base does not have; or several processes.
    """

    def __init__(
        self,
        base: Base,
        slots: Mapping[int, int],
        targets: Sequence[str] = (lora_tree.ALL_LINEAR, "unembed"),
        shapes: Sequence[BlockShape] = (),
        remat: str = "names",
        host_bytes: int = 4 << 30,
        folder: Path | None = None,
    ):
        if remat not in transformer.REMAT:
            raise choice("remat", remat, transformer.REMAT)
        if (count := multihost.count()) > 1:
            raise UserError(
                f"live training runs in one process, here are {count}: start one process over all"
                " devices, or train by a job"
            )
        if not slots or any(b != lora_tree.bucket_of(b) or n < 1 for b, n in slots.items()):
            raise UserError(
                f"slots is {dict(slots)}; expected numbers of slots by rank, with ranks that are"
                " powers of two"
            )
        shapes = shapes or shapes_for(base.mesh)
        if any(min(shape) < 1 for shape in shapes) or all(shape.width > 1 for shape in shapes):
            raise UserError(
                f"shapes is {list(shapes)}; expected sizes of at least 1, one of them for plain"
                " targets"
            )
        # The mesh splits rows, so a shape needs enough blocks for every part of the mesh.
        even = [
            shape._replace(blocks=_round_up(shape.blocks, shape.rows, base.row_multiple))
            for shape in shapes
        ]
        self.base, self.shapes, self.remat = (
            base,
            tuple(sorted(dict.fromkeys(even), key=lambda s: s.size)),
            remat,
        )
        self.specs = transformer.abstract(base.cfg)
        self.targets = lora_tree.spelled_out(
            AdapterConfig(1, targets=tuple(targets)), self.specs
        ).targets
        self.slots = dict(sorted(slots.items()))
        self.host_bytes, self.folder = host_bytes, folder
        self.counts: collections.Counter[str] = collections.Counter(dict.fromkeys(COUNTS, 0))
        self.times = StepTimes()
        self._spills_from = 0.0  # monotonic seconds from which the disk is tried again
        self.compiled: Programs | None = None
        self._policies: dict[str, _TrainedPolicy] = {}
        self._free = {bucket: list(range(n))[::-1] for bucket, n in self.slots.items()}
        self._clock = 0
        self._brought: collections.defaultdict[str, float] = collections.defaultdict(float)
        with jax.set_mesh(base.mesh):
            self.state: State = _empty(base.cfg, tuple(self.slots.items()), self.targets)

    # -- membership

    def join(self, name: str, state: HostState) -> None:
        """Adds a policy, with a state from ``host_state.fresh`` or one that was read before.

        Raises:
            UserError: the name is taken, or no slot fits the adapter.
        """
        if name in self._policies:
            raise UserError(f"policy {name!r} is in training already: choose another name")
        self._policies[name] = self._admitted(name, state)
        self._spill()

    def replace(self, name: str, state: HostState) -> None:
        """Replaces a policy's state; drops its pending gradients.

        Raises:
            UserError: an unknown policy, or no slot fits the adapter.
        """
        new = self._admitted(name, state)
        self.leave(name)
        self._policies[name] = new
        self._spill()

    def _admitted(self, name: str, state: HostState) -> _TrainedPolicy:
        config = state.config
        bucket = next((b for b in self.slots if b >= config.rank), None)
        if bucket is None:
            raise UserError(
                f"policy {name!r} has rank {config.rank}; this server trains ranks up to"
                f" {max(self.slots)}"
            )
        targets = lora_tree.spelled_out(config, self.specs).targets
        if strange := [t for t in targets if t not in self.targets]:
            raise UserError(
                f"policy {name!r} adapts {strange[0]!r}; this server trains"
                f" {', '.join(self.targets)}"
            )
        lora_tree.check_fits(state.adapter(), config, self.specs, f"policy {name!r}")
        self._clock += 1
        return _TrainedPolicy(
            config, bucket, state, pending="grad" in state.parts, used=self._clock
        )

    def leave(self, name: str) -> None:
        """Removes a policy and its state.

        Raises:
            UserError: an unknown policy.
        """
        policy = self._known(name)
        if policy.slot is not None:
            self._free[policy.bucket].append(policy.slot)
        if isinstance(policy.off_device, SpilledState):
            policy.off_device.path.unlink(missing_ok=True)
        del self._policies[name]

    def _known(self, name: str) -> _TrainedPolicy:
        if name not in self._policies:
            raise UserError(
                f"policy {name!r} is not in training; policies are"
                f" {', '.join(self._policies) or 'none'}"
            )
        return self._policies[name]

    def __contains__(self, name: str) -> bool:
        return name in self._policies

    def config(self, name: str) -> AdapterConfig:
        return self._known(name).config

    def where(self, name: str) -> str:
        """Returns the location of a policy's state: ``slot``, ``host`` or ``disk``."""
        policy = self._known(name)
        return (
            "slot"
            if policy.slot is not None
            else "host"
            if isinstance(policy.off_device, HostState)
            else "disk"
        )

    def names(self) -> list[str]:
        return list(self._policies)

    def places(self) -> dict[str, int]:
        """Returns the number of policies by location: ``slot``, ``host``, ``disk``."""
        return dict(collections.Counter(map(self.where, list(self._policies))))

    @property
    def host_bytes_used(self) -> int:
        """Bytes of the states in host memory."""
        return sum(
            policy.off_device.nbytes
            for policy in list(self._policies.values())
            if isinstance(policy.off_device, HostState)
        )

    # -- computation

    def choose(
        self, works: Sequence[TrainRequest], bound_s: float | None = None
    ) -> tuple[BlockShape, list[DatumBlock]]:
        """Returns the shape of the next step and its blocks: the shape with the most tokens a
        second among those whose measured time is at most ``bound_s``. If none is, the cheapest that
        serves the first request.

        Args:
            works: the first is always served, the others as far as they fit.

        Raises:
            UserError: the first has no data left, or no shape is long and wide enough (it was not
                checked).
        """
        first = works[0]
        if not first.left:
            raise UserError(
                f"the request of policy {first.policy!r} is complete: it has no data left"
            )
        alike, names = [], set[str]()
        for work in works:
            if work.left and self._kind(work) == self._kind(first):
                names |= (
                    {work.policy}
                    if len(names) < self.slots[self._known(first.policy).bucket]
                    else set()
                )
                alike += [work] if work.policy in names else []
        found = []
        for shape in self.shapes:
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
        """Returns the properties that all requests of one step must share."""
        return self._known(work.policy).bucket, work.backward, work.width > 1, work.routed

    def can_start(self, work: TrainRequest) -> bool:
        """Returns True if a compiled step takes a part of a request's remaining data. If none does,
        the smallest such program is compiled next.
        """
        if self.compiled is None or work.policy not in self or not work.left:
            return True
        shortest = min(work.data[i].tokens.size for i in work.left)
        fit = [
            s
            for s in self.shapes
            if (s.width > 1) == (work.width > 1) and s.width >= work.width and s.tokens >= shortest
        ]
        return (
            not fit
            or any(self._has(work, shape) for shape in fit)
            or self.compiled.want(self._key(work, fit[0]))
        )

    def can_move(self) -> bool:
        """Returns True if policies can be loaded into slots and updated without compiling."""
        return self.compiled is None or all(
            self.compiled.has(("update", bucket)) for bucket in self.slots
        )

    @property
    def is_ready(self) -> bool:
        """True if a policy of each rank can be trained by some compiled step; from any thread."""
        keys = (
            ("step", bucket, shape, True, False)
            for bucket in self.slots
            for shape in self.shapes
            if shape.width == 1
        )
        compiled = self.compiled
        return compiled is None or (
            self.can_move() and {key[1] for key in keys if compiled.has(key)} == set(self.slots)
        )

    def _key(self, work: TrainRequest, shape: BlockShape) -> tuple[Any, ...]:
        return "step", self._known(work.policy).bucket, shape, work.backward, work.routed

    def _has(self, work: TrainRequest, shape: BlockShape) -> bool:
        return self.compiled is None or self.compiled.has(self._key(work, shape))

    def step(self, works: Sequence[TrainRequest], bound_s: float | None = None) -> Step:
        """Computes a part of the remaining data of these requests, always some of the first, and
        stores the results in the requests.

        Gradients add to those of their policies. See ``choose``.
        """
        shape, made = self.choose(works, bound_s)
        batch, places = blocks_lib.fill(made, shape)
        bucket = self._known(made[0].work.policy).bucket
        at = self.load([block.work.policy for block in made])
        slots = np.full(shape.blocks, self.slots[bucket], np.int32)
        slots[: len(made)] = [at[block.work.policy].index for block in made]
        began = time.perf_counter()
        logp, losses = self._run(
            bucket, batch, [block.work.coefs for block in made], slots, made[0].work.backward
        )
        seconds = time.perf_counter() - began
        self.times.add(shape, made[0].work.backward, seconds)
        if made[0].work.backward:
            for block in made:
                self._policies[block.work.policy].pending = True
        blocks_lib.collect(places, logp.reshape(*shape[:3], shape.width), losses)
        self.counts["steps"] += 1
        self.counts["tokens"] += blocks_lib.used(made)
        self.counts["padded_tokens"] += shape.size
        return Step(shape, made, seconds)

    def _run(
        self, bucket: int, batch: Any, coefs: Sequence[LossCoefs], slots: np.ndarray, backward: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        column = _column(coefs, len(slots))
        with jax.set_mesh(self.base.mesh):
            if backward:
                stack = {bucket: self.state.pop(bucket)}  # donated
                new, logp, metrics = step_lib.forward_backward(
                    self.base.params,
                    stack,
                    batch,
                    column,
                    {bucket: slots},
                    cfg=self.base.cfg,
                    remat=self.remat,
                )
                self.state |= new
                logp, losses = jax.device_get((logp, metrics["loss"]))
            else:
                stacks = {bucket: self.state[bucket].adapters}
                logp, losses = jax.device_get(
                    step_lib.score_losses(
                        self.base.params, batch, column, stacks, {bucket: slots}, cfg=self.base.cfg
                    )
                )
        return np.asarray(logp), np.asarray(losses)

    def optim(self, updates: Mapping[str, OptimizerConfig]) -> dict[str, dict[str, float]]:
        """Updates each named policy from its gradients with these hyperparameters, and clears the
        gradients.

        A policy whose gradient is not finite keeps its state, and ``skipped`` is 1.

        Returns:
            ``grad_norm`` (before clipping), ``learning_rate`` and ``skipped`` by policy.
        """
        out: dict[str, dict[str, float]] = {}
        for bucket in self.slots:
            names = [name for name in updates if self._known(name).bucket == bucket]
            for i in range(0, len(names), self.slots[bucket]):
                out |= self._optim(bucket, names[i : i + self.slots[bucket]], updates)
        return {name: out[name] for name in updates}

    def _optim(
        self, bucket: int, names: list[str], updates: Mapping[str, OptimizerConfig]
    ) -> dict[str, dict[str, float]]:
        S, at = self.slots[bucket], self.load(names)
        slots = np.full(S, S, np.int32)
        slots[: len(names)] = [at[name].index for name in names]
        rows = [Hyper.of(updates[name]) for name in names] + [Hyper.of(OptimizerConfig())] * (
            S - len(names)
        )
        hyper = jax.tree.map(lambda *values: np.stack(values), *rows)
        with jax.set_mesh(self.base.mesh):
            self.state[bucket], metrics = step_lib.optim_step_with(
                self.state.pop(bucket), slots, np.int32(len(names)), hyper
            )
        host = jax.device_get(metrics)
        for name in names:
            self._policies[name].pending = False
        self.state = dict(sorted(self.state.items()))
        return {
            name: {key: float(values[i]) for key, values in host.items()}
            for i, name in enumerate(names)
        }

    def forget_gradients(self, name: str) -> None:
        """Drops a policy's pending gradients, after a request failed."""
        if self._known(name).pending:
            self.replace(name, self.read_state(name).without_gradients())

    # -- location of states

    def load(self, names: Sequence[str]) -> dict[str, Slot]:
        """Loads policies into slots and returns the slots.

        Raises:
            StateLost: a state cannot be read from its file; the others are unchanged.
            UserError: more policies of a rank than slots.
        """
        wanted = dict.fromkeys(names)
        for bucket, count in self.slots.items():
            if (many := sum(self._known(n).bucket == bucket for n in wanted)) > count:
                raise UserError(
                    f"{many} policies of rank {bucket} were requested at once; there are {count}"
                    " slots: request fewer"
                )
        self._clock += 1
        for name in wanted:
            self._known(name).used = self._clock
        for name in wanted:
            if self._policies[name].slot is None:
                began = time.perf_counter()
                try:
                    self._bring(self._policies[name])
                except (OSError, UserError) as reason:
                    raise StateLost(name, reason) from reason
                # Otherwise the transfer would be timed as part of the next computation.
                jax.block_until_ready(self.state[self._policies[name].bucket])
                self._brought[name] += time.perf_counter() - began
        self._spill()
        return {
            name: Slot(self._policies[name].bucket, self._policies[name].slot)  # type: ignore[arg-type]
            for name in wanted
        }

    def brought(self) -> dict[str, float]:
        """Returns the seconds of loading by policy since the last call."""
        out, self._brought = dict(self._brought), collections.defaultdict(float)
        return out

    def _bring(self, policy: _TrainedPolicy) -> None:
        free = self._free[policy.bucket]
        if not free:
            here = [
                p
                for p in self._policies.values()
                if p.bucket == policy.bucket and p.slot is not None
            ]
            idle = min(here, key=lambda p: p.used)
            idle.off_device = self._read_slot(idle)
            free.append(idle.slot)  # type: ignore[arg-type]
            idle.slot = None
        spilled = policy.off_device if isinstance(policy.off_device, SpilledState) else None
        if spilled is not None:
            policy.off_device = spilled.read()
            self.counts["spills_read"] += 1
        assert isinstance(policy.off_device, HostState)
        slot = free.pop()
        with jax.set_mesh(self.base.mesh):
            one = one_slot.padded(policy.off_device, self.state[policy.bucket])
            self.state[policy.bucket] = one_slot.write(
                self.state.pop(policy.bucket), np.int32(slot), one, cfg=self.base.cfg
            )
        self.state = dict(sorted(self.state.items()))
        policy.slot, policy.off_device = slot, None
        if spilled is not None:
            spilled.path.unlink(missing_ok=True)
        self.counts["slots_written"] += 1

    def _read_slot(self, policy: _TrainedPolicy, parts_of: Sequence[str] = PARTS) -> HostState:
        """Copies these ``PARTS`` of a policy's state from its slot to the host."""
        assert policy.slot is not None
        with jax.set_mesh(self.base.mesh):
            one = one_slot.read(self.state[policy.bucket], np.int32(policy.slot))
        self.counts["slots_read"] += 1
        return one_slot.to_host(
            one,
            policy.config,
            self.specs,
            [name for name in parts_of if name != "grad" or policy.pending],
        )

    def read_state(self, name: str) -> HostState:
        """Returns a copy of a policy's state, wherever it is."""
        policy = self._known(name)
        if policy.slot is not None:
            return self._read_slot(policy)
        return (
            policy.off_device.read()
            if isinstance(policy.off_device, SpilledState)
            else policy.off_device
        )  # type: ignore[return-value]

    def adapter(self, name: str) -> HostState:
        """Returns ``read_state`` without moments and gradients; reads only the adapter from the
        device.
        """
        policy = self._known(name)
        return (
            self._read_slot(policy, ("factors",))
            if policy.slot is not None
            else self.read_state(name).fresh()
        )

    def _spill(self) -> None:
        """Writes states to files until those in memory fit ``host_bytes``. States stay in memory
        while the disk rejects them.
        """
        if self.folder is None or time.monotonic() < self._spills_from:
            return
        here = sorted(
            (p for p in self._policies.values() if isinstance(p.off_device, HostState)),
            key=lambda p: -p.used,
        )
        total = 0
        for policy in here:
            assert isinstance(policy.off_device, HostState)
            total += policy.off_device.nbytes
            if total > self.host_bytes:
                try:
                    policy.off_device = SpilledState.write(
                        policy.off_device, self.folder / f"{uuid.uuid4().hex}.safetensors"
                    )
                except OSError as reason:
                    log.warning(
                        "states beyond %d bytes stay in memory: %s", self.host_bytes, reason
                    )
                    self._spills_from = time.monotonic() + SPILL_RETRY_S
                    return
                self.counts["spills_written"] += 1

    def warm(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compiles every program, so that no request waits for a compilation.

        Args:
            progress: called with (program, done, total) before each program.
        """
        for i, program in enumerate(todo := self.programs()):
            if progress is not None:
                progress(program.name, i, len(todo))
            program.build()

    def programs(self) -> list[Program]:
        """Returns every program: updates of each rank, and steps with and without a backward pass;
        if the base has experts, also steps that replay them.
        """
        out = []
        smallest = next(shape for shape in self.shapes if shape.width == 1)
        for bucket in self.slots:
            build = functools.partial(self._compile_update, bucket, abstract(self.state[bucket]))
            out.append(Program(("update", bucket), f"update, rank {bucket}", build, 0))
            for routed in (False, True) if self.base.cfg.routed else (False,):
                for backward in (True, False):
                    for shape in self.shapes:
                        what = "forward and backward" if backward else "forward"
                        sizes = f"{shape.blocks} x {shape.rows} rows of {shape.tokens}"
                        also = (
                            f", {shape.width} targets a position" if shape.width > 1 else ""
                        ) + (", with routes" if routed else "")
                        urgency = (
                            2
                            if shape.width > 1 or routed
                            else 0
                            if backward and shape == smallest
                            else 1
                        )
                        build = functools.partial(
                            self._compile_step,
                            bucket,
                            abstract(self.state[bucket]),
                            shape,
                            backward,
                            routed,
                        )
                        key = "step", bucket, shape, backward, routed
                        out.append(
                            Program(key, f"{what}, rank {bucket}, {sizes}{also}", build, urgency)
                        )
        return out

    def _compile_update(self, bucket: int, stack: Any) -> None:
        count = self.slots[bucket]
        hyper = jax.tree.map(
            lambda x: np.zeros((count, *x.shape), x.dtype), Hyper.of(OptimizerConfig())
        )
        with jax.set_mesh(self.base.mesh):
            step_lib.optim_step_with.lower(
                stack, np.full(count, count, np.int32), np.int32(0), hyper
            ).compile()
            one_slot.read.lower(stack, np.int32(0)).compile()
            one = jax.tree.map(
                lambda x: np.zeros(x.shape, x.dtype),
                jax.eval_shape(one_slot.in_bucket, stack, np.int32(0)),
            )
            one_slot.write.lower(stack, np.int32(0), one, cfg=self.base.cfg).compile()

    def _compile_step(
        self, bucket: int, stack: Any, shape: BlockShape, backward: bool, routed: bool
    ) -> None:
        cfg, params = self.base.cfg, self.base.params
        batch, _ = blocks_lib.fill([], shape)
        if routed:
            like = transformer.cache_specs(cfg, 1, routes=True)["moe"]["routes"]
            batch = dataclasses.replace(
                batch, routes=np.full((like.shape[0], *shape[:3], like.shape[-1]), -1, np.int16)
            )
        column, slots = (
            _column([], shape.blocks),
            {bucket: np.full(shape.blocks, self.slots[bucket], np.int32)},
        )
        with jax.set_mesh(self.base.mesh):
            if backward:
                step_lib.forward_backward.lower(
                    params, {bucket: stack}, batch, column, slots, cfg=cfg, remat=self.remat
                ).compile()
            else:
                step_lib.score_losses.lower(
                    params, batch, column, {bucket: stack.adapters}, slots, cfg=cfg
                ).compile()


def _column(coefs: Sequence[LossCoefs], count: int) -> LossCoefs:
    """Returns the loss coefficients of a step's blocks, ``[count]`` each; padding has no loss."""
    columns = zip(*[*coefs, *[NO_LOSS] * (count - len(coefs))])
    kinds = ("kind", "kl_kind")
    return LossCoefs(
        *(  # type: ignore[arg-type]
            np.array(c, np.int32 if n in kinds else np.float32)
            for n, c in zip(LossCoefs._fields, columns)
        )
    )


def _round_up(blocks: int, rows: int, parts: int) -> int:
    """Returns the smallest number >= ``blocks`` whose rows split into ``parts`` equal parts."""
    return next(n for n in range(blocks, blocks + parts) if n * rows % parts == 0)


@functools.partial(jax.jit, static_argnames=("cfg", "slots", "targets"))
def _empty(cfg: ModelConfig, slots: tuple[tuple[int, int], ...], targets: tuple[str, ...]) -> State:
    specs = transformer.abstract(cfg)
    configs = [AdapterConfig(bucket, targets=targets) for bucket, _ in slots]
    return lora_tree.constrain(state_lib.empty(specs, configs, dict(slots)), specs)
