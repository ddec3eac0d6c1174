"""What workers do to a catalog, until they are killed.

Every deed is announced in the worker's log, with what it will add, and acknowledged there after its
call has returned; both lines are synced. Values are never used twice, so bytes tell which deed they
are of; the audit log names it as the author.
"""

import itertools
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.storage import folder
from mint_jax.errors import UserError
from tests.catalog.adapters import SCHEMA, packed

# all other changes are one transaction, as a promotion is
KINDS = ("compact", "gc", "export_many", "promote", "rollout")
TRASH = "trash"  # keeps its last two revisions; all others keep theirs
SHARED = "shared"
_PER_WORKER = 10_000  # values of one worker


class Worker:
    """One writer with its log.

    Args:
        number: of the worker, unique in the catalog.
        log: file of its announcements and acknowledgements.
        grace_s: of its collections.
        own: a policy that is there, to go on with; by default one of its own.
    """

    def __init__(
        self, catalog: Catalog, number: int, log: str, grace_s: float, own: str | None = None
    ):
        self.catalog, self.number, self.grace_s = catalog, number, grace_s
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._values = itertools.count(number * _PER_WORKER)
        self._deeds = itertools.count()
        self._own = own or f"own{number}"
        self._numbers = [one.number for one in catalog.revisions(own)] if own else []

    def say(self, **line: Any) -> None:
        os.write(self._log, json.dumps(line).encode() + b"\n")
        os.fsync(self._log)

    def value(self) -> int:
        return next(self._values)

    def deed(self, kind: str, call: Callable[[str], Any], **adds: Any) -> Any:
        """Announces, does, acknowledges. ``call`` gets the author's name, and returns records of
        what it made.
        """
        by = f"w{self.number}.{next(self._deeds)}"
        self.say(by=by, kind=kind, **adds)
        try:
            made = call(by)
        except UserError as error:
            self.say(by=by, refused=str(error))
            raise
        revisions = made if isinstance(made, list) else []
        self.say(by=by, done=[[one.policy, one.number, one.digest, one.step] for one in revisions])
        return made

    def exports(self, kind: str, policies: list[str], step: int, create: bool) -> list:
        items = [Export(policy, packed(self.value()), step) for policy in policies]
        adds = [[item.policy, digest_of(item.data), step] for item in items]
        return self.deed(
            kind,
            lambda by: self.catalog.export_many(items, create=create, by=by),
            revisions=adds,
            create=create,
        )

    def export_many(self) -> None:
        """Some of the policies are new."""
        new = f"lab/in{self.value()}"
        made = self.exports("export_many", [self._own, SHARED, TRASH, TRASH, new], 2, True)
        self._numbers.append(made[0].number)

    def promote(self) -> None:
        number = self._numbers[self.value() % len(self._numbers)]
        self.deed("promote", lambda by: self.catalog.promote(self._own, number, by=by))

    def rollout(self) -> None:
        data = packed(self.value())
        call = lambda by: self.catalog.rollout(self._own, 4, data, tokens=7, mean_reward=0.5, by=by)  # noqa: E731
        self.deed("rollout", call, rollout=[self._own, digest_of(data)])

    def gc(self) -> None:
        self.deed("gc", lambda by: self.catalog.gc(grace_s=self.grace_s, compact=False, by=by))

    def compact(self) -> None:
        self.deed("compact", lambda by: self.catalog.gc(grace_s=3600.0, by=by))

    def ready(self, kind: str) -> None:
        """Makes what a deed needs to have something to do."""
        while len(self._numbers) < 2:
            self.export_many()
        if kind in ("gc", "compact"):
            for _ in range(3):
                self.exports("export", [TRASH], 7, True)
        if kind == "gc" and self.grace_s == 0.0:
            self.catalog.store.put([packed(self.value())])  # a pack that nobody ever commits
            (Path(self.catalog.store.url) / "staging").mkdir(exist_ok=True)
            (Path(self.catalog.store.url) / "staging" / f"{self.value():032x}").write_bytes(
                b"half a pack"
            )


def warm(catalog: Catalog) -> None:
    """Makes the shared policies, and does every deed once, so that all statements are compiled."""
    from tests.catalog.faults import inspect

    for policy, keep_last in ((SHARED, None), (TRASH, 2)):
        catalog.create_policy(policy, SCHEMA, keep_last=keep_last)
    Path(catalog.store.url).mkdir(exist_ok=True)
    log = Path(catalog.store.url).parent / "logs" / "0"
    log.parent.mkdir()
    worker = Worker(catalog, 0, str(log), 0.0)
    for kind in KINDS:
        worker.ready(kind)
        getattr(worker, kind)()
    found = inspect.inspect(catalog, str(log.parent), collect=True)
    assert not found, found


def for_ever(catalog: Catalog, number: int, log: str, seed: int, grace_s: float) -> None:
    """Deeds in random order, until killed."""
    worker, choice = Worker(catalog, number, log, grace_s), random.Random(seed)
    worker.ready("promote")
    worker.say(begun=True)
    while True:
        kind = choice.choice(KINDS)
        worker.ready(kind)
        getattr(worker, kind)()


def killed_at(catalog: Catalog, number: int, log: str, kind: str, boundary: int) -> int:
    """Looks at what the one before left; then does one deed, killed before its call number
    ``boundary``, of those that change storage or database; the last is the acknowledgement.
    Returns the number of boundaries, where ``boundary`` is beyond them.
    """
    from tests.catalog.faults import inspect

    found = inspect.inspect(catalog, str(Path(log).parent), collect=True)
    assert not found, found
    worker = Worker(catalog, number, log, 0.0, "own0")
    worker.ready(kind)
    fuse = Fuse(boundary)
    fuse.lay(catalog)
    say = worker.say

    def last(**line: Any) -> None:
        if "done" in line:
            fuse.burn()
        say(**line)

    worker.say = last  # type: ignore[method-assign]
    getattr(worker, kind)()
    fuse.left = -1
    return fuse.passed


class Fuse:
    """Kills its own process when so many calls of the storage or the database have been made."""

    def __init__(self, left: int):
        self.left, self.passed, self._last = left, 0, ""

    def _statement(self, connection: Any, cursor: Any, text: str, *_: Any) -> None:
        if text != self._last and not text.lstrip().startswith(("SELECT", "PRAGMA")):
            self.burn()
        self._last = text

    def burn(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        self.passed += 1

    def before(self, call: Callable) -> Callable:
        def burning(*arguments: Any, **options: Any) -> Any:
            self.burn()
            return call(*arguments, **options)

        return burning

    def lay(self, catalog: Catalog) -> None:
        """Before every statement and commit, and before every call of the storage that changes the
        disk.
        """
        sa.event.listen(catalog.database.engine, "before_cursor_execute", self._statement)
        for name in ("commit", "rollback"):
            sa.event.listen(catalog.database.engine, name, lambda *_: self.burn())
        folder.sync_folder = self.before(folder.sync_folder)
        folder.os = _Module(
            os, {name: self.before(getattr(os, name)) for name in ("fsync", "rename")}
        )  # type: ignore[assignment]
        folder.open = lambda *a, **k: _Module(self.before(open)(*a, **k), self)  # type: ignore[attr-defined]
        for name in ("mkdir", "unlink"):
            setattr(Path, name, self.before(getattr(Path, name)))


class _Module:
    """A module or a file, some of its functions replaced."""

    def __init__(self, real: Any, replaced: Any):
        self._real = real
        if isinstance(replaced, Fuse):
            replaced = {name: replaced.before(getattr(real, name)) for name in ("write", "flush")}
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
