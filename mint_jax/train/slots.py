"""Locations of policies in training: slots of the stacked state on the devices, host memory, files.

With a declared number of slots, a policy of a rank in between uses the next larger slot, padded
with zeros that stay zero, and the least recently used policy is evicted when a slot is needed: a
policy joins, leaves and moves without compiling. Otherwise every policy stays in a slot of its own
rank bucket, whose stack grows and shrinks with them.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack, Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.config import ModelConfig
from mint_jax.train import host_state
from mint_jax.train import state as state_lib
from mint_jax.train.host_state import PARTS, HostState, SpilledState
from mint_jax.train.state import State, TrainStack

log = logging.getLogger("mint_jax.train")
SPILL_RETRY_S = 5.0  # seconds until the disk is tried again after a failed write
# Unlike a digest, a version of weights is known without a copy to the host.
_versions = itertools.count(1)


class StateLost(UserError):
    """The state of ``policy`` cannot be read from its file."""

    def __init__(self, policy: str, reason: Exception):
        super().__init__(
            f"the state of policy {policy!r} cannot be read ({reason}): load a checkpoint into it"
        )
        self.policy = policy


@dataclasses.dataclass(eq=False)
class _Member:
    config: AdapterConfig
    bucket: int
    off_device: HostState | SpilledState | None  # None while the state is in a slot
    slot: int | None = None
    pending: bool = False  # has gradients that no update has used
    used: int = 0
    version: int = 0

    def forget_file(self) -> None:
        if isinstance(self.off_device, SpilledState):
            self.off_device.path.unlink(missing_ok=True)


class Slots:
    """The policies in training, wherever their state is.

    Args:
        declared: number of device slots by rank bucket, a power of two; None gives each policy its
            own.
        targets: projections that policies may adapt; every declared slot has room for all of them.
        experts: form of their factors of routed experts, see ``AdapterConfig``.
        host_bytes: limit on states in host memory; beyond it the least recently used ones are
            written to files in ``folder``. None keeps all states in memory.

    Attributes:
        capacity: number of device slots by rank bucket.
    """

    def __init__(
        self,
        base: Base,
        declared: Mapping[int, int] | None,
        targets: Sequence[str],
        experts: str,
        host_bytes: int,
        folder: Path | None,
    ):
        self.base, self.specs = base, transformer.abstract(base.cfg)
        self.host_bytes, self.folder = host_bytes, folder
        self.counts: collections.Counter[str] = collections.Counter()
        self.capacity = dict(sorted((declared or {}).items()))
        self._is_declared, self._experts = declared is not None, experts
        self._targets: tuple[str, ...] = ()  # of declared slots
        self._members: dict[str, _Member] = {}
        self._clock = 0
        self._brought: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._spills_from = 0.0  # monotonic seconds from which the disk is tried again
        self._state: State = {}
        if declared is not None:
            if not declared or any(
                b != lora_tree.bucket_of(b) or n < 1 for b, n in declared.items()
            ):
                raise UserError(
                    f"slots is {dict(declared)}; expected numbers of slots by rank, with ranks that"
                    " are powers of two"
                )
            own = AdapterConfig(1, targets=tuple(targets), experts=experts)
            own = lora_tree.spelled_out(own, self.specs)
            self._targets = own.targets
            self._state = self._empty(self.capacity, own.names)

    @property
    def state(self) -> State:
        """The stacked state on the devices. Setting it renews all versions."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        for member in self._members.values():
            member.pending, member.version = True, next(_versions)

    def _updated(self, name: str) -> None:
        member = self._members[name]
        member.pending, member.version = False, next(_versions)

    @property
    def stacks(self) -> Stacks:
        """Adapters for the sampling engine: the arrays that training updates, without a copy."""
        return {bucket: stack.adapters for bucket, stack in self._state.items()}

    @property
    def slots(self) -> dict[str, Slot]:
        """Slot of each policy on the devices."""
        return {
            name: Slot(member.bucket, member.slot)
            for name, member in self._members.items()
            if member.slot is not None
        }

    @property
    def versions(self) -> dict[str, int]:
        """Version of each policy's adapter; renewed whenever it may have changed."""
        return {name: member.version for name, member in self._members.items()}

    # -- membership

    def join(self, name: str, state: HostState) -> None:
        """Adds a policy. Raises ``UserError`` if the name is taken or no slot fits the adapter."""
        self.join_all({name: state})

    def join_all(self, states: Mapping[str, HostState]) -> None:
        # Without declared slots the stacks grow, and their programs are compiled again.
        if taken := [name for name in states if name in self]:
            raise UserError(f"policy {taken[0]!r} is in training already: choose another name")
        members = {name: self._admitted(name, state) for name, state in states.items()}
        self._members |= members
        if not self._is_declared:
            for bucket in {member.bucket: None for member in members.values()}:
                self._resize(bucket)
        self._spill()

    def replace(self, name: str, state: HostState) -> None:
        """Replaces a policy's state; drops its pending gradients. Raises ``UserError`` if no slot
        fits the adapter.
        """
        old, new = self._known(name), self._admitted(name, state)
        if not self._is_declared:
            lora_tree.check_fits(state.adapter(), old.config, self.specs, f"policy {name!r}")
        if old.bucket == new.bucket:
            new.slot = old.slot
        old.forget_file()
        self._members[name] = new
        if new.slot is not None:
            self._write(new, state)
        self._spill()

    def _admitted(self, name: str, state: HostState) -> _Member:
        config = lora_tree.spelled_out(state.config, self.specs)
        bucket = config.bucket
        if self._is_declared:
            found = lora_tree.bucket_for(config.rank, self.capacity)
            if found is None:
                raise UserError(
                    f"policy {name!r} has {config.size}; this server trains ranks up to"
                    f" {max(self.capacity)}"
                )
            bucket = found
            paths = lora_tree.projections(self.specs, config.names)
            if config.experts != self._experts and any("/experts/" in path for path in paths):
                raise UserError(
                    f"policy {name!r} has experts {config.experts!r}; this server trains"
                    f" {self._experts!r}, as its setting experts says"
                )
            if strange := [t for t in config.targets if t not in self._targets]:
                raise UserError(
                    f"policy {name!r} adapts {strange[0]!r}; this server trains"
                    f" {', '.join(self._targets)}"
                )
        lora_tree.check_fits(state.adapter(), state.config, self.specs, f"policy {name!r}")
        self._clock += 1
        member = _Member(state.config, bucket, state, used=self._clock, version=next(_versions))
        member.pending = "grad" in state.parts
        return member

    def leave(self, name: str) -> None:
        """Removes a policy. Without declared slots, later slots of its bucket move down by one."""
        member = self._known(name)
        member.forget_file()
        del self._members[name]
        if not self._is_declared:
            self._resize(member.bucket)

    def _known(self, name: str) -> _Member:
        if name not in self._members:
            raise UserError(
                f"policy {name!r} is not in training; policies are"
                f" {', '.join(self._members) or 'none'}"
            )
        return self._members[name]

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def where(self, name: str) -> str:
        """Returns the location of a policy's state: ``slot``, ``host`` or ``disk``."""
        member = self._known(name)
        if member.slot is not None:
            return "slot"
        return "host" if isinstance(member.off_device, HostState) else "disk"

    def names(self) -> list[str]:
        return list(self._members)

    def places(self) -> dict[str, int]:
        return dict(collections.Counter(map(self.where, list(self._members))))

    @property
    def host_bytes_used(self) -> int:
        states = [member.off_device for member in list(self._members.values())]
        return sum(state.nbytes for state in states if isinstance(state, HostState))

    # -- device slots

    def _empty(self, counts: Mapping[int, int], targets: tuple[str, ...]) -> State:
        with jax.set_mesh(self.base.mesh):
            return _empty(self.base.cfg, tuple(counts.items()), targets)

    def _resize(self, bucket: int) -> None:
        """Gives a bucket one slot for each of its policies, which keep their state and order."""
        members = [member for member in self._members.values() if member.bucket == bucket]
        states = [self._read(m) if m.off_device is None else m.off_device for m in members]
        self._state = {b: stack for b, stack in self._state.items() if b != bucket}
        self.capacity = {b: n for b, n in self.capacity.items() if b != bucket}
        if not members:
            return
        own = (lora_tree.spelled_out(member.config, self.specs).names for member in members)
        targets = tuple(dict.fromkeys(itertools.chain(*own)))
        self.capacity = dict(sorted((self.capacity | {bucket: len(members)}).items()))
        stack = self._empty({bucket: len(members)}, targets)
        self._state = dict(sorted((self._state | stack).items()))
        for slot, (member, state) in enumerate(zip(members, states)):
            assert isinstance(state, HostState), "undeclared slots spill nothing"
            member.slot = slot
            self._write(member, state)

    def load(self, names: Sequence[str]) -> dict[str, Slot]:
        """Loads policies into slots and returns the slots. Raises ``StateLost`` for a file that
        cannot be read, and ``UserError`` for more policies of a rank than slots.
        """
        wanted = {name: self._known(name) for name in names}
        for bucket, count in self.capacity.items():
            if (many := sum(member.bucket == bucket for member in wanted.values())) > count:
                raise UserError(
                    f"{many} policies of rank {bucket} were requested at once; there are {count}"
                    " slots: request fewer"
                )
        self._clock += 1
        for member in wanted.values():
            member.used = self._clock
        for name, member in wanted.items():
            if member.slot is None:
                began = time.perf_counter()
                try:
                    self._bring(member)
                except (OSError, UserError) as reason:
                    raise StateLost(name, reason) from reason
                # Otherwise the transfer would be timed as part of the next computation.
                jax.block_until_ready(self._state[member.bucket])
                self._brought[name] += time.perf_counter() - began
        self._spill()
        at = self.slots
        return {name: at[name] for name in wanted}

    def brought(self) -> dict[str, float]:
        """Returns the seconds of loading by policy since the last call."""
        out, self._brought = dict(self._brought), collections.defaultdict(float)
        return out

    def _bring(self, member: _Member) -> None:
        here = [m for m in self._members.values() if m.bucket == member.bucket]
        taken = {m.slot for m in here}
        slot = next((n for n in range(self.capacity[member.bucket]) if n not in taken), None)
        if slot is None:
            idle = min((m for m in here if m.slot is not None), key=lambda m: m.used)
            idle.off_device = self._read(idle)
            slot, idle.slot = idle.slot, None
        spilled = member.off_device
        if isinstance(spilled, SpilledState):
            member.off_device = spilled.read()
            self.counts["spills_read"] += 1
        assert isinstance(member.off_device, HostState)
        member.slot = slot
        self._write(member, member.off_device)
        if isinstance(spilled, SpilledState):
            spilled.path.unlink(missing_ok=True)

    def _write(self, member: _Member, state: HostState | TrainStack) -> None:
        stack = self._state[member.bucket]
        one = host_state.padded(state, stack) if isinstance(state, HostState) else state
        with jax.set_mesh(self.base.mesh):
            new = state_lib.write_slot(stack, _number(member), one, cfg=self.base.cfg)
        self._state = {**self._state, member.bucket: new}
        member.off_device, member.version = None, next(_versions)
        self.counts["slots_written"] += 1

    def _read_one(self, member: _Member) -> TrainStack:
        with jax.set_mesh(self.base.mesh):
            one = state_lib.read_slot(self._state[member.bucket], _number(member))
        return multihost.whole(one)

    def _read(self, member: _Member, wanted: Sequence[str] = PARTS) -> HostState:
        """Copies these ``PARTS`` of a policy's state from its slot to the host."""
        self.counts["slots_read"] += 1
        present = [part for part in wanted if part != "grad" or member.pending]
        return host_state.to_host(self._read_one(member), member.config, self.specs, present)

    def read_state(self, name: str) -> HostState:
        """Returns a copy of a policy's state, wherever it is."""
        member = self._known(name)
        if isinstance(member.off_device, SpilledState):
            return member.off_device.read()
        return self._read(member) if member.off_device is None else member.off_device

    def read_adapter(self, name: str) -> HostState:
        """Returns ``read_state`` without moments and gradients, which are not copied either."""
        member = self._known(name)
        if member.slot is not None:
            return self._read(member, ("factors",))
        return self.read_state(name).fresh()

    def snapshot(self, name: str) -> Any:
        """Returns a copy of one policy's adapter on the devices, in every process. Its transfer to
        the host is started, so that ``jax.device_get`` in another thread only waits.
        """
        at, config = self.load([name])[name], self._members[name].config
        stack, slot = self._state[at.bucket].adapters, np.int32(at.index)
        arrays = multihost.whole(_adapter(stack, slot, cfg=self.base.cfg, adapter=config))
        for array in jax.tree.leaves(arrays):
            array.copy_to_host_async()
        return arrays

    def adapter(self, name: str) -> Any:
        """Returns one policy's adapter on the host, at its true rank and targets."""
        return jax.tree.map(np.asarray, jax.device_get(self.snapshot(name)))

    def _spill(self) -> None:
        """Writes states to files until those in memory fit ``host_bytes``."""
        if self.folder is None or time.monotonic() < self._spills_from:
            return
        total = 0
        for member in sorted(self._members.values(), key=lambda m: -m.used):
            if not isinstance(state := member.off_device, HostState):
                continue
            total += state.nbytes
            if total <= self.host_bytes:
                continue
            try:
                path = self.folder / f"{uuid.uuid4().hex}.safetensors"
                member.off_device = SpilledState.write(state, path)
            except OSError as reason:
                log.warning("states beyond %d bytes stay in memory: %s", self.host_bytes, reason)
                self._spills_from = time.monotonic() + SPILL_RETRY_S
                return
            self.counts["spills_written"] += 1


def _number(member: _Member) -> np.int32:
    assert member.slot is not None
    return np.int32(member.slot)


@functools.partial(jax.jit, static_argnames=("cfg", "slots", "targets"))
def _empty(cfg: ModelConfig, slots: tuple[tuple[int, int], ...], targets: tuple[str, ...]) -> State:
    specs = transformer.abstract(cfg)
    kinds = {True: "lora", False: lora_tree.BIAS}
    configs = [AdapterConfig(b, targets=targets, kind=kinds[b > 0]) for b, _ in slots]
    return lora_tree.constrain(state_lib.empty(specs, configs, dict(slots)), specs)


@functools.partial(jax.jit, static_argnames=("cfg", "adapter"))
def _adapter(stack: AdapterStack, slot: jax.Array, cfg: ModelConfig, adapter: AdapterConfig) -> Any:
    return lora_tree.read_slot(
        stack, slot, adapter.rows, lora_tree.adapter_specs(transformer.abstract(cfg), adapter)
    )
