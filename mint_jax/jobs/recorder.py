"""A run's side of the catalog: it claims its policies, and one thread beside the training writes
what the run leaves.

The run's identity is in its workdir, so a run that was killed takes its own policies back at once,
and another run of the same policies is refused until this one has ended. Was it killed on another
machine, which cannot be asked, the run waits until its sessions have expired, ``SESSION_S`` seconds
after it last renewed them; one that goes on renewing them is alive. Where a policy began, and what
its rollouts are drawn from, is looked up once: a run that is killed and started again does not
begin elsewhere because an alias moved meanwhile.

The thread writes revisions, checkpoints and rollouts, and renews the sessions. What waits is taken
together, so revisions that came while a slow storage wrote the ones before go out as one pack and
one transaction. Process 0 alone has a recorder.
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
from mint_jax.jobs import common
from mint_jax.jobs.catalogs import JobCatalog
from mint_jax.jobs.hold import Hold
from mint_jax.lora import peft

SESSION_S = 120.0  # a run that is gone keeps others from its policies for so long
RENEW_S = SESSION_S / 4
WAITING = 16  # pieces of work that may wait; then the training waits for the storage
POLL_S = 1.0  # between looks at a session that another machine may hold


class Snapshot:
    """An adapter as it was at one moment: its own arrays on the devices. Its version is known at
    once; its bytes and their digest are made on the host when first asked for, by the thread that
    asks: the recorder's.

    Args:
        arrays: each whole in this process, their copies to the host under way.

    Attributes:
        version: the trainer's, at that moment.
    """

    def __init__(self, arrays: Any, schema: Schema, version: int):
        self._arrays, self._schema, self.version = arrays, schema, version
        self._lock = threading.Lock()
        self._packed: tuple[bytes, str] | None = None

    def _made(self) -> tuple[bytes, str]:
        with self._lock:
            if self._packed is None:
                data = pack(jax.device_get(self._arrays), self._schema)
                self._packed, self._arrays = (data, digest_of(data)), None
            return self._packed

    @property
    def data(self) -> bytes:
        """The packed object."""
        return self._made()[0]

    @property
    def digest(self) -> str:
        """The packed object's digest."""
        return self._made()[1]


@dataclasses.dataclass(frozen=True)
class _Export:
    """Revisions to be made, by policy. ``final``: ``latest`` is to name them, even if the catalog
    has them and newer ones.
    """

    snapshots: Mapping[str, Snapshot]
    step: int
    origin: str
    sampling: Mapping[str, Mapping[str, Any]]
    final: bool


class Recorder:
    """See the module. Steps are the run's; the records count on from the revision that a policy
    began with.

    Args:
        sessions: the right to write each policy, by the catalog's full names.
        leases: on revisions that the run samples from.
        start: ``number`` and ``step`` of the revision that a policy began with, if any.

    Attributes:
        numbers: of each policy's newest revision of this run.
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
        self.numbers = {
            policy: start[policy]["number"] if policy in start else 0 for policy in sessions
        }
        self._before = {
            policy: start[policy]["step"] if policy in start else 0 for policy in sessions
        }
        self.final: dict[str, tuple[str, int]] = {}
        # (policy, step, digest) of records from before an interruption
        self._made: set[tuple[str, int, str]] = set()
        self._error: BaseException | None = None
        self._queue: queue.Queue[_Export | Callable[[], None] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="catalog", daemon=True)
        self._thread.start()

    def resume(self, numbers: Mapping[str, int]) -> None:
        """Looks up what this run recorded before it was interrupted, so that repeated steps make no
        second record.

        Args:
            numbers: of the newest revisions that the checkpoint knows; without a checkpoint, empty.
        """
        for policy in self.sessions:
            self.numbers[policy] = numbers.get(policy, self.numbers[policy])
            # the newest one too: it may be of the checkpoint's step, which is exported again
            after = max(0, self.numbers[policy] - 1)
            while page := self.catalog.revisions(policy, after):
                self._made |= {
                    (policy, revision.step, revision.digest)
                    for revision in page
                    if revision.state == "live"
                }
                after = page[-1].number
            self._made |= {
                (policy, old.step, old.digest) for old in self.catalog.rollouts(policy, 1000)
            }

    def export(
        self,
        snapshots: Mapping[str, Snapshot],
        step: int,
        origin: str,
        sampling: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        final: bool = False,
    ) -> None:
        """Makes revisions, later; raises what an earlier piece of work raised.

        Args:
            sampling: how their rollouts are drawn, of the policies that have any.
        """
        self._put(_Export(snapshots, step, origin, sampling, final))

    def rollout(
        self, policy: str, step: int, make: Callable[[int], tuple[bytes, int, float]], keep: int
    ) -> None:
        """Records a rollout object, later, and forgets those from ``keep`` steps ago and before.

        Args:
            make: from the step as recorded to the object, its sampled tokens and its mean reward.
        """

        def work() -> None:
            recorded = self._before[policy] + step
            data, tokens, mean_reward = make(recorded)
            if (policy, recorded, digest_of(data)) not in self._made:
                session = self.sessions[policy]
                self.catalog.rollout(
                    policy, recorded, data, tokens=tokens, mean_reward=mean_reward, session=session
                )
            if step >= keep:
                self.catalog.drop_rollouts(policy, recorded + 1 - keep)

        self._put(work)

    def promote(self, policy: str, snapshot: Snapshot, alias: str, why: str) -> None:
        """Points an alias at the revision of a snapshot that was exported before, later."""

        def work() -> None:
            self.catalog.promote(policy, snapshot.digest, alias, why=why)

        self._put(work)

    def checkpoint(self, place: str, steps: Mapping[str, int], keep: int | None = None) -> None:
        """Records a durable checkpoint of policies at these steps, later, unless it is recorded
        already.

        Args:
            keep: of how many newest ones the files are kept; records of others go.
        """

        def work() -> None:
            for policy, step in steps.items():
                step += self._before[policy]
                if all(
                    (old.step, old.place) != (step, place)
                    for old in self.catalog.checkpoints(policy, 10)
                ):
                    self.catalog.checkpoint(
                        policy, step, place, session=self.sessions[policy], keep=keep
                    )

        self._put(work)

    def _put(self, work: _Export | Callable[[], None]) -> None:
        self._check()
        self._queue.put(work)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Returns when all that was submitted is durable.

        Raises:
            Whatever went wrong: a ``UserError`` where the storage refuses, or another owner took a
            policy over.
        """
        self._queue.join()
        self._check()

    def stop(self) -> None:
        """Finishes what waits, gives the sessions and leases back, and ends the thread. Raises
        nothing of the work's.
        """
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        due, ended = time.monotonic() + RENEW_S, False
        while not ended:
            taken = self._take(max(0.0, due - time.monotonic()))
            ended = None in taken
            try:
                if self._error is None:
                    self._export([work for work in taken if isinstance(work, _Export)])
                    for work in taken:
                        if callable(work):
                            work()
                    if time.monotonic() >= due:
                        self._renew()
                        due = time.monotonic() + RENEW_S
                elif time.monotonic() >= due:
                    due = float("inf")  # nothing more is written: others may have the policies
                if ended:
                    self._give_back()
            except BaseException as error:  # raised in the training's thread by its next call
                self._error = self._error or error
            for _ in taken:
                self._queue.task_done()

    def _take(self, timeout: float) -> list[Any]:
        """What waits now, in order; nothing after ``timeout`` seconds."""
        taken = []
        try:
            taken.append(self._queue.get(timeout=min(timeout, threading.TIMEOUT_MAX)))
            while True:
                taken.append(self._queue.get_nowait())
        except queue.Empty:
            return taken

    def _export(self, exports: list[_Export]) -> None:
        wanted = [
            (e, policy, e.step + self._before[policy], s)
            for e in exports
            for policy, s in e.snapshots.items()
        ]
        wanted = [w for w in wanted if w[0].final or (*w[1:3], w[3].digest) not in self._made]
        made = self.catalog.export_many(
            [
                Export(p, s.data, step, self.sessions[p], e.origin, sampling=e.sampling.get(p))
                for e, p, step, s in wanted
            ]
        )
        for (export, policy, _, _), revision in zip(wanted, made):
            self.numbers[policy] = max(self.numbers[policy], revision.number)
            if export.final:
                self.final[policy] = (revision.digest, revision.number)

    def _renew(self) -> None:
        for policy, session in self.sessions.items():
            self.sessions[policy] = self.catalog.renew_session(session, SESSION_S)
        self.leases = [self.catalog.renew_lease(lease, SESSION_S) for lease in self.leases]

    def _give_back(self) -> None:
        ends = [functools.partial(self.catalog.release, lease) for lease in self.leases]
        ends += [
            functools.partial(self.catalog.close_session, session)
            for session in self.sessions.values()
        ]
        for end in ends:
            try:
                end()
            except UserError as error:
                # fenced off, or the database is gone: the others are given back all the same
                self._error = self._error or error


class Claimed(NamedTuple):
    """What ``claim_policies`` found.

    Attributes:
        start: digest of the revision from which a policy goes on, by the catalog's names; none for
            a new policy.
        fixed: digest or PEFT directory that a policy's rollouts are drawn from.
        references: that of the reference of its loss.
        recorder: process 0's, holding a session per policy; None elsewhere.
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
    hold: Hold | None,
    references: Mapping[str, str] | None = None,
) -> Claimed:
    """Makes the records that are missing and opens the sessions; all processes call it.

    Args:
        schemas: of the policies, by the catalog's names.
        file: where the run's identity is kept.
        rollout_revisions, references: names of revisions or PEFT directories, by policy.
        hold: process 0's, on the folder of ``file``.

    Raises:
        UserError: a policy is trained by another run, or by this one on another machine; it is
            retired, or of another base or adapter config; an unknown revision.
    """
    recorder: Recorder | None = None

    def begin() -> list[dict[str, str]]:
        nonlocal recorder
        main = catalog.main
        run = _read(file)
        if "id" not in run:
            run = _write(file, {"id": uuid.uuid4().hex})
        assert hold is not None
        mine = f"run {run['id']} on {hold.me.machine}"
        owner, why = f"{mine}, {hold.me}", str(file.parent.absolute())
        for name, schema in schemas.items():
            _check_record(main, name, schema, why)
        sessions: dict[str, Session] = {}
        leases: list[Lease] = []
        try:
            for name in schemas:
                sessions[name] = _open_session(
                    main, name, owner, f"run {run['id']} ", mine if hold.sure else None, why
                )
            if "start" not in run:
                fixed = {name: _digest(main, text) for name, text in rollout_revisions.items()}
                referred = {name: _digest(main, text) for name, text in (references or {}).items()}
                run = _write(
                    file,
                    run | {"start": _newest(main, schemas), "fixed": fixed, "references": referred},
                )
            named = run.get("references", {})
            needed = [*run["fixed"].values(), *named.values()]
            leases += [
                main.lease(d, owner, SESSION_S)
                for d in dict.fromkeys(needed)
                if not peft.is_peft(Path(d))
            ]
            recorder = Recorder(main, sessions, leases, run["start"])
        except BaseException:
            for lease in leases:
                main.release(lease)
            for session in sessions.values():
                main.close_session(session)
            raise
        return [{name: old["digest"] for name, old in run["start"].items()}, run["fixed"], named]

    start, fixed, named = multihost.agree("policies in the catalog", begin)
    return Claimed(start, fixed, named, recorder)


def _open_session(
    main: Catalog, name: str, owner: str, mine: str, gone: str | None, why: str
) -> Session:
    """A policy's session. Where this very run has it on another machine, waits until that one
    proves dead, or alive.

    Args:
        mine: what the names of all owners of this run begin with; ``gone``: of those that are known
            to have ended.
    """
    until: float | None = None
    while True:
        try:
            return main.open_session(name, owner, SESSION_S, instead_of=gone, why=why)
        except UserError:
            record = main.policy(name)
            if not (record.session_owner or mine).startswith(mine) or until not in (
                None,
                record.session_expires or until,
            ):
                raise
            if until is None:
                common.say(
                    f"policy {name} is held by {record.session_owner}: waiting up to"
                    f" {SESSION_S:.0f} s for a sign of life of it"
                )
                until = record.session_expires
        time.sleep(POLL_S)


def _check_record(main: Catalog, name: str, schema: Schema, why: str) -> None:
    try:
        record = main.policy(name)
    except UserError:  # not there yet; what else may be wrong, making it says again
        main.create_policy(name, schema, why=why)
        return
    there = Schema.from_json(record.schema)
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
    """Digest, number and step of the newest revision of those policies that have one."""
    found = {}
    for name in names:
        if main.policy(name).revisions:
            newest = main.revision(name, "latest")
            found[name] = {"digest": newest.digest, "number": newest.number, "step": newest.step}
    return found


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
