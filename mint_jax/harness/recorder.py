"""A training run's side of the catalog: it claims its policies, and one thread writes revisions,
checkpoints and rollouts while training goes on.

``run.json`` in the workdir has the run's id, by which a killed run takes back its own policies at
once; other runs of these policies are refused until the run has ended. A run that was killed on
another machine is taken back when its sessions expire, ``SESSION_S`` seconds after their last
renewal. ``run.json`` also has the revisions that policies began with and that rollouts are drawn
from: a restarted run uses the same ones, even where an alias has moved.

Only the first process has a recorder.
"""

import dataclasses
import functools
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from mint_jax import multihost
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, digest_of, pack
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.records.leases import Lease
from mint_jax.catalog.records.sessions import Session
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.harness.catalogs import JobCatalog
from mint_jax.harness.start import say
from mint_jax.harness.workdir import WorkdirLock
from mint_jax.lora import peft

SESSION_S = 120.0  # a dead run keeps others from its policies for this long
RENEW_S = SESSION_S / 4
QUEUED = 16  # writes that may wait; then training waits for the storage
POLL_S = 1.0  # between looks at a session of another machine


class Snapshot:
    """An adapter at one moment, in arrays of its own. The recorder's thread copies them to the host
    and packs them when it first needs their bytes.

    Args:
        arrays: each whole in this process, their copies to the host started.

    Attributes:
        version: of the trainer.
    """

    def __init__(self, arrays: Any, schema: Schema, version: int):
        self._arrays, self._schema, self.version = arrays, schema, version

    @functools.cached_property
    def data(self) -> bytes:
        """The packed object."""
        data, self._arrays = pack(jax.device_get(self._arrays), self._schema), None
        return data

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the packed object."""
        return digest_of(self.data)


class Recorder:
    """The writing thread. Steps are the run's own; records add the steps of the revision that the
    policy began with. Every method but ``stop`` raises the error of an earlier write.

    Args:
        sessions: right to write each policy, by the catalog's full names.
        leases: on revisions that rollouts are drawn from.
        start: ``number`` and ``step`` of the revision that a policy began with, if any.

    Attributes:
        numbers: number of each policy's newest revision of this run.
        final: digest and number of the final revisions.
    """

    def __init__(
        self,
        catalog: Catalog,
        sessions: Mapping[str, Session],
        leases: list[Lease],
        start: Mapping[str, Mapping[str, Any]],
    ):
        self.catalog, self.sessions, self.leases = catalog, dict(sessions), leases
        began = {policy: start.get(policy, {"number": 0, "step": 0}) for policy in sessions}
        self.numbers: dict[str, int] = {policy: one["number"] for policy, one in began.items()}
        self._first_step: dict[str, int] = {policy: one["step"] for policy, one in began.items()}
        self.final: dict[str, tuple[str, int]] = {}
        # (policy, step, digest) of records from before an interruption
        self._recorded: set[tuple[str, int, str]] = set()
        self._error: BaseException | None = None
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._work, name="catalog", daemon=True)
        self._thread.start()

    def resume(self, numbers: Mapping[str, int]) -> None:
        """Looks up the records from before an interruption: repeated steps make no second record.

        Args:
            numbers: of the checkpoint's newest revisions; empty without a checkpoint.
        """
        for policy in self.sessions:
            self.numbers[policy] = numbers.get(policy, self.numbers[policy])
            # the checkpoint's own step is exported again, so its revision counts too
            after = max(0, self.numbers[policy] - 1)
            found: list[Any] = list(self.catalog.rollouts(policy, 1000))
            while page := self.catalog.revisions(policy, after):
                found += [revision for revision in page if revision.state == "live"]
                after = page[-1].number
            self._recorded |= {(policy, one.step, one.digest) for one in found}

    def export(
        self,
        snapshots: Mapping[str, Snapshot],
        step: int,
        origin: str,
        sampling: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        final: bool = False,
    ) -> None:
        """Writes revisions, in one transaction.

        Args:
            sampling: settings that rollouts are drawn with, by policy.
            final: the alias latest moves to them, even from newer ones.
        """

        def write() -> None:
            exports = []
            for policy, snapshot in snapshots.items():
                at = step + self._first_step[policy]
                if final or (policy, at, snapshot.digest) not in self._recorded:
                    about = self.sessions[policy], origin
                    made = Export(policy, snapshot.data, at, *about, sampling=sampling.get(policy))
                    exports.append(made)
            for export, revision in zip(exports, self.catalog.export_many(exports)):
                policy = export.policy
                self.numbers[policy] = max(self.numbers[policy], revision.number)
                if final:
                    self.final[policy] = (revision.digest, revision.number)

        self._put(write)

    def rollout(
        self, policy: str, step: int, make: Callable[[int], tuple[bytes, int, float]], keep: int
    ) -> None:
        """Writes a rollout object and drops those of ``keep`` steps before.

        Args:
            make: takes the recorded step; returns the object, its sampled tokens and mean reward.
        """

        def write() -> None:
            recorded = self._first_step[policy] + step
            data, tokens, mean = make(recorded)
            if (policy, recorded, digest_of(data)) not in self._recorded:
                about: Any = {"tokens": tokens, "mean_reward": mean}
                self.catalog.rollout(policy, recorded, data, session=self.sessions[policy], **about)
            if step >= keep:
                self.catalog.drop_rollouts(policy, recorded + 1 - keep)

        self._put(write)

    def promote(self, policy: str, snapshot: Snapshot, alias: str, why: str) -> None:
        """Points an alias at the revision of an exported snapshot."""

        def write() -> None:
            self.catalog.promote(policy, snapshot.digest, alias, why=why)

        self._put(write)

    def checkpoint(self, place: str, steps: Mapping[str, int], keep: int | None = None) -> None:
        """Records a durable checkpoint of policies at these steps, once.

        Args:
            keep: number of newest checkpoints whose records stay.
        """

        def write() -> None:
            for policy, step in steps.items():
                step += self._first_step[policy]
                known = [(one.step, one.place) for one in self.catalog.checkpoints(policy, 10)]
                if (step, place) not in known:
                    session = self.sessions[policy]
                    self.catalog.checkpoint(policy, step, place, session=session, keep=keep)

        self._put(write)

    def _put(self, work: Callable[[], None]) -> None:
        self._check()
        self._queue.put(work)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Returns when everything submitted is durable.

        Raises:
            Any error of a write: a ``UserError`` where the storage refuses, or another owner has
            taken a policy.
        """
        self._queue.join()
        self._check()

    def stop(self) -> None:
        """Finishes what waits, closes sessions and leases, and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        due, work = time.monotonic() + RENEW_S, self._renew
        while work is not None:
            # after an error nothing more is written: others may have the policies
            if self._error is None and time.monotonic() >= due:
                self._attempt(self._renew)
                due = time.monotonic() + RENEW_S
            wait = None if self._error is not None else max(0.0, due - time.monotonic())
            try:
                work = self._queue.get(timeout=wait)
            except queue.Empty:
                continue
            if work is None:
                self._attempt(self._close_sessions)
            elif self._error is None:
                self._attempt(work)
            self._queue.task_done()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the training thread's next call raises it
            self._error = self._error or error

    def _renew(self) -> None:
        for policy, session in self.sessions.items():
            self.sessions[policy] = self.catalog.renew_session(session, SESSION_S)
        self.leases = [self.catalog.renew_lease(lease, SESSION_S) for lease in self.leases]

    def _close_sessions(self) -> None:
        ends = [functools.partial(self.catalog.release, lease) for lease in self.leases]
        for session in self.sessions.values():
            ends.append(functools.partial(self.catalog.close_session, session))
        for end in ends:
            try:
                end()
            except UserError as error:  # fenced off, or the database is gone: go on with the others
                self._error = self._error or error


class Claim(NamedTuple):
    """Policies that a run has claimed.

    Attributes:
        start: digest of the revision that a policy continues, by the catalog's names; new policies
            have none.
        fixed: digest or PEFT directory that a policy's rollouts are drawn from.
        references: digest or PEFT directory of the reference of a policy's loss.
        recorder: None in all processes but the first.
    """

    start: dict[str, str]
    fixed: dict[str, str]
    references: dict[str, str]
    recorder: Recorder | None


def claim_policies(
    catalog: JobCatalog,
    schemas: Mapping[str, Schema],
    file: Path,
    rollout_revisions: Mapping[str, str],
    lock: WorkdirLock | None,
    references: Mapping[str, str] = MappingProxyType({}),
) -> Claim:
    """Creates missing policies and opens a session of each; all processes call it.

    Args:
        schemas: by the catalog's names of the policies.
        file: ``run.json`` of the workdir.
        rollout_revisions, references: names of revisions or PEFT directories, by policy.
        lock: the first process's, on the folder of ``file``.

    Raises:
        UserError: a policy is trained by another run, is retired, or is of another base or adapter
            config; an unknown revision.
    """
    recorder: Recorder | None = None

    def begin() -> list[dict[str, str]]:
        nonlocal recorder
        assert lock is not None
        main, run = catalog.main, _read(file)
        if "id" not in run:
            run = _write(file, {"id": uuid.uuid4().hex})
        machine, why = f"run {run['id']} on {lock.me.machine}", str(file.parent.absolute())
        owner, dead = f"{machine}, {lock.me}", machine if lock.is_sure else None
        for name, schema in schemas.items():
            _check_record(main, name, schema, why)
        sessions: dict[str, Session] = {}
        leases: list[Lease] = []
        try:
            for name in schemas:
                sessions[name] = _open_session(main, name, owner, f"run {run['id']} ", dead, why)
            if "start" not in run:
                fixed, named = (
                    {name: _digest(main, text) for name, text in some.items()}
                    for some in (rollout_revisions, references)
                )
                began = {"start": _newest(main, schemas), "fixed": fixed, "references": named}
                run = _write(file, run | began)
            needed = dict.fromkeys([*run["fixed"].values(), *run["references"].values()])
            for digest in needed:
                if not peft.is_peft(Path(digest)):
                    leases.append(main.lease(digest, owner, SESSION_S))
            recorder = Recorder(main, sessions, leases, run["start"])
        except BaseException:
            for lease in leases:
                main.release(lease)
            for session in sessions.values():
                main.close_session(session)
            raise
        start = {name: old["digest"] for name, old in run["start"].items()}
        return [start, run["fixed"], run["references"]]

    start, fixed, named = multihost.agree("policies in the catalog", begin)
    return Claim(start, fixed, named, recorder)


def _open_session(
    main: Catalog, name: str, owner: str, run: str, dead: str | None, why: str
) -> Session:
    """Opens a policy's session. Where this run has it on another machine, waits until it expires,
    or is renewed.

    Args:
        run: prefix of all owners of this run; ``dead``: prefix of those that are known to be dead.
    """
    until: float | None = None
    while True:
        try:
            return main.open_session(name, owner, SESSION_S, instead_of=dead, why=why)
        except UserError:
            record = main.policy(name)
            renewed = until not in (None, record.session_expires or until)
            if not (record.session_owner or run).startswith(run) or renewed:
                raise
            if until is None:
                say(
                    f"policy {name} is held by {record.session_owner}: waiting up to"
                    f" {SESSION_S:.0f} s for a sign of life of it"
                )
                until = record.session_expires
        time.sleep(POLL_S)


def _check_record(main: Catalog, name: str, schema: Schema, why: str) -> None:
    try:
        there = Schema.from_json(main.policy(name).schema)
    except UserError:  # a new policy; creating it raises any other error again
        main.create_policy(name, schema, why=why)
        return
    if there.base != schema.base:
        raise UserError(
            f"policy {name!r} of the catalog is of base {there.base[:12]}, this run's is"
            f" {schema.base[:12]}: choose another name, tenant or catalog"
        )
    for field in dataclasses.fields(schema.config):
        had, wanted = getattr(there.config, field.name), getattr(schema.config, field.name)
        if had != wanted:
            raise UserError(
                f"policy {name!r} of the catalog has {field.name} {had!r}, this config says"
                f" {wanted!r}: repeat the former, or choose another name, tenant or catalog"
            )


def _newest(main: Catalog, names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns digest, number and step of the newest revision of each policy that has one."""
    found = {n: main.revision(n, "latest") for n in names if main.policy(n).revisions}
    return {n: {"digest": r.digest, "number": r.number, "step": r.step} for n, r in found.items()}


def _digest(main: Catalog, text: str) -> str:
    return text if "@" not in text and peft.is_peft(Path(text)) else main.resolve(text).digest


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(
            f"{file} is damaged: it names this run to the catalog; choose another --workdir"
        ) from None


def _write(file: Path, run: dict[str, Any]) -> dict[str, Any]:
    write_file(file, json.dumps(run))
    return run
