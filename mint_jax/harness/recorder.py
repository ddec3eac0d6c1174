"""A training run's side of the catalog: it claims its policies, and one thread of the first process
writes revisions, checkpoints and rollouts while training goes on.

``run.json`` in the workdir has the run's id, by which a killed run takes back its own policies and
fences off a process that still writes. It also has the revisions that policies began with and that
rollouts are drawn from: a restarted run uses the same ones, even where an alias has moved.
"""

import contextlib
import dataclasses
import functools
import json
import os
import queue
import socket
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
from mint_jax.catalog.records.leases import Lease
from mint_jax.catalog.records.sessions import Session
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.harness.adapters import JobCatalog
from mint_jax.lora import peft

SESSION_S = 120.0  # a dead run keeps others from its policies for this long
QUEUED = 16  # writes that may wait; then training waits for the storage


class Snapshot:
    """An adapter after some steps of its policy, in arrays of its own; the thread that first needs
    their bytes packs them.
    """

    def __init__(self, arrays: Any, schema: Any, step: int):
        self._arrays, self._schema, self.step = arrays, schema, step
        self._packing, self._data = threading.Lock(), b""

    @classmethod
    def known(cls, digest: str, step: int) -> "Snapshot":
        """Returns one without data."""
        made = cls(None, None, step)
        made.digest = digest
        return made

    @property
    def data(self) -> bytes:
        with self._packing:
            if not self._data:
                self._data = pack(jax.device_get(self._arrays), self._schema)
                self._arrays = None
        return self._data

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(self.data)


class CatalogWriter:
    """A thread that writes to the catalog in order, and renews the run's sessions (the right to
    write each policy) and leases. ``put`` and ``drain`` raise the error of an earlier write.
    """

    def __init__(self, catalog: Catalog, sessions: Mapping[str, Session], leases: list[Lease]):
        self.catalog, self.sessions, self._leases = catalog, dict(sessions), leases
        self._error: BaseException | None = None
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._work, name="catalog", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], object]) -> None:
        """Adds a write; waits while too many are queued."""
        self._check()
        self._queue.put(write)

    def drain(self) -> None:
        """Returns when everything submitted is durable."""
        self._queue.join()
        self._check()

    def stop(self) -> None:
        """Finishes what waits, closes sessions and leases, and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def records_since(self, numbers: Mapping[str, int]) -> set[tuple[str, int, str]]:
        """Returns policy, step and digest of rollouts, and of revisions from these numbers on."""
        found: list[Any] = []
        for policy, number in numbers.items():
            found += self.catalog.rollouts(policy, 1000)
            after = max(0, number - 1)  # the checkpoint's own step is exported again
            while page := self.catalog.revisions(policy, after):
                found += [revision for revision in page if revision.state == "live"]
                after = page[-1].number
        return {(one.policy, one.step, one.digest) for one in found}

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        due, write = time.monotonic() + SESSION_S / 4, self._renew
        while write is not None:
            with contextlib.suppress(queue.Empty):
                write = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                self._attempt(write or self._close)
                self._queue.task_done()
            if time.monotonic() >= due:
                self._attempt(self._renew)
                due = time.monotonic() + SESSION_S / 4

    def _attempt(self, write: Callable[[], object]) -> None:
        # after an error nothing more is written: others may have the policies
        if self._error is None or write == self._close:
            try:
                write()
            except BaseException as error:  # the training thread's next call raises it
                self._error = self._error or error

    def _renew(self) -> None:
        for policy, session in self.sessions.items():
            self.sessions[policy] = self.catalog.renew_session(session, SESSION_S)
        self._leases = [self.catalog.renew_lease(lease, SESSION_S) for lease in self._leases]

    def _close(self) -> None:
        with contextlib.ExitStack() as ends:  # all, whichever of them fail
            for session in self.sessions.values():
                ends.callback(self.catalog.close_session, session)
            for lease in self._leases:
                ends.callback(self.catalog.release, lease)


class Claim(NamedTuple):
    """Policies that a run has claimed."""

    start: dict[str, dict[str, Any]]  # digest, number and step of revisions that policies continue
    fixed: dict[str, str]  # this and references: digest or PEFT directory, by policy
    references: dict[str, str]
    writer: CatalogWriter | None  # in the first process


def claim_policies(
    catalog: JobCatalog,
    schemas: Mapping[str, Schema],
    file: Path,
    fixed: Mapping[str, str],
    references: Mapping[str, str] = MappingProxyType({}),
) -> Claim:
    """Creates missing policies and opens a session of each; all processes call it. Raises
    ``UserError`` if a policy is trained by another run, is retired, or is of another base or
    adapter config.

    Args:
        schemas: by the catalog's names of the policies.
        file: ``run.json`` of the workdir, which this process has locked.
        fixed, references: adapters that rollouts are drawn from, and that losses compare with.
    """
    writer: CatalogWriter | None = None

    def digest(text: str) -> str:
        if "@" not in text and peft.is_peft(Path(text)):
            return text
        return catalog.main.resolve(text).digest

    def begin() -> list[dict[str, Any]]:
        nonlocal writer
        main, run, why = catalog.main, _read(file), str(file.parent.absolute())
        own = f"run {run['id']} "
        owner = f"{own}on {socket.gethostname()}, process {os.getpid()}"
        for name, schema in schemas.items():
            _check_record(main, name, schema, why)
        with contextlib.ExitStack() as on_error:
            sessions: dict[str, Session] = {}
            for name in schemas:
                opened = main.open_session(name, owner, SESSION_S, instead_of=own, why=why)
                sessions[name] = opened
                on_error.callback(main.close_session, opened)
            if "start" not in run:
                continued = [name for name in schemas if main.policy(name).revisions]
                newest = {name: main.revision(name, "latest") for name in continued}
                run["start"] = {
                    name: {"digest": found.digest, "number": found.number, "step": found.step}
                    for name, found in newest.items()
                }
                run["fixed"] = {name: digest(text) for name, text in fixed.items()}
                run["references"] = {name: digest(text) for name, text in references.items()}
                write_file(file, json.dumps(run))
            named = dict.fromkeys([*run["fixed"].values(), *run["references"].values()])
            revisions = [one for one in named if not peft.is_peft(Path(one))]
            leases = main.lease(revisions, owner, SESSION_S)
            on_error.pop_all()
        writer = CatalogWriter(main, sessions, leases)
        return [run["start"], run["fixed"], run["references"]]

    start, drawn_from, compared = multihost.agree("policies in the catalog", begin)
    return Claim(start, drawn_from, compared, writer)


def _check_record(main: Catalog, name: str, schema: Schema, why: str) -> None:
    """Creates a policy, or refuses one of another base or adapter config."""
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


def _read(file: Path) -> dict[str, Any]:
    """Returns what ``run.json`` has; a new one gets an id."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        run = {"id": uuid.uuid4().hex}
        write_file(file, json.dumps(run))
        return run
    except ValueError:
        raise UserError(
            f"{file} is damaged: it names this run to the catalog; choose another --workdir"
        ) from None
