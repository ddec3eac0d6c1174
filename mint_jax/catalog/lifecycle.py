"""The catalog's door: names, revisions, aliases and their history, over a database and a payload store.

    catalog = Catalog.open("runs/catalog")                      # SQLite and payloads in one folder
    catalog = Catalog.open("postgresql://db/mint", "s3://bucket/payloads")
    catalog.create_policy("chat", schema)
    revision = catalog.export("chat", packed, step=100)         # durable and visible when it returns
    catalog.promote("chat", revision.number, "serving", why="best of the sweep")
    catalog.resolve("chat@serving")                             # digest, place, schema

Every change is one transaction with its entry in the audit log. All methods may be called from many threads, and many
processes may open one catalog. Revisions are named as ``names`` says; errors are ``UserError``.
"""

import getpass
import itertools
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mint_jax.catalog import (
    aliases,
    audit,
    branches,
    compaction,
    evaluations,
    exports,
    leases,
    lookup,
    lost_commits,
    names,
    operations,
    policies,
    recovery,
    retention,
    sessions,
    stats,
    sweep,
    training,
    verify,
)
from mint_jax.catalog.audit import Author
from mint_jax.catalog.database import Database
from mint_jax.catalog.exports import Export
from mint_jax.catalog.packed import Buffer, Schema, digest_of
from mint_jax.catalog.payloads import PackDamaged, PackMissing, PayloadStore, Place
from mint_jax.catalog.records import (
    Alias,
    AuditEntry,
    Evaluation,
    Lease,
    Operation,
    PolicyRecord,
    Resolved,
    Revision,
    RolloutRecord,
    Session,
    TrainingCheckpoint,
)
from mint_jax.errors import UserError

T = TypeVar("T")


class Catalog:
    """See the module.

    Args:
        database: opened already.
        store: the payloads.
        actor: who makes the changes, where a method's ``by`` says nothing.
        clock: seconds since 1970.
    """

    def __init__(self, database: Database, store: PayloadStore, actor: str | None = None, clock: Callable[[], float] = time.time):
        self.database, self.store = database, store
        self.actor = f"{_user()}@{socket.gethostname()}" if actor is None else actor
        self._clock = clock

    @classmethod
    def open(
        cls,
        place: str | Path,
        payloads: str | Path | None = None,
        *,
        actor: str | None = None,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> "Catalog":
        """Opens a catalog, making it where there is none.

        Args:
            place: a folder, which holds ``catalog.db`` and ``payloads/``; or a database URL.
            payloads: URL or folder of the payloads; required with a database URL.
            timeout_s: how long a locked or lost database is waited for.

        Raises:
            UserError: the database or the folder cannot be used, or is of a newer version.
        """
        if "://" in str(place):
            if payloads is None:
                raise UserError(f"database {str(place).split('@')[-1]!r} needs a place for the payloads too: a folder, s3://… or gs://…")
            url = str(place)
        else:
            folder = Path(place).absolute()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"catalog folder {folder} cannot be made ({error.strerror}): choose a writable place") from None
            url = "sqlite:///" + str(folder / "catalog.db")
            payloads = folder / "payloads" if payloads is None else payloads
        database = Database(url, timeout_s)
        try:
            catalog = cls(database, PayloadStore(str(payloads)), actor, clock)
            lost_commits.record(database, catalog._author(None, "found on opening"))
            return catalog
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        """Closes the database's connections."""
        self.database.close()

    def __enter__(self) -> "Catalog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _author(self, by: str | None, why: str) -> Author:
        return Author(self.actor if by is None else by, why, self._clock())

    def _look(self, policy: str, body: Callable[[Any, Any], T]) -> T:
        """``body(connection, its row)`` of a policy, in a transaction that reads."""
        key = names.parse_policy(policy)
        return self.database.read(lambda c: body(c, policies.find(c, *key)))

    def _change(self, policy: str, body: Callable[[Any, Author, Any], T], by: str | None = None, why: str = "", active: bool = False) -> T:
        """``body(connection, author, its row)`` of a policy, in a transaction that writes; the row is locked.

        Args:
            active: refuse a retired policy.
        """
        key, author = names.parse_policy(policy), self._author(by, why)
        return self.database.write(lambda c: body(c, author, policies.lock(c, *key, active=active)))

    # Policies

    def create_policy(
        self, name: str, schema: Schema, *, keep_last: int | None = None, by: str | None = None, why: str = ""
    ) -> PolicyRecord:
        """Makes a policy whose revisions will have ``schema``.

        Args:
            name: ``name`` or ``tenant/name``.
            keep_last: how many of the newest revisions ``gc`` keeps; None keeps all.

        Raises:
            UserError: the name is taken or not allowed.
        """
        key, author = names.parse_policy(name), self._author(by, why)

        def body(connection):
            policies.create(connection, author, *key, schema, keep_last)
            return policies.record(connection, *key)

        return self.database.write(body)

    def policy(self, name: str) -> PolicyRecord:
        """A policy's record."""
        key = names.parse_policy(name)
        return self.database.read(lambda c: policies.record(c, *key))

    def policies(
        self, tenant: str | None = None, after: str | None = None, limit: int = 100, state: str | None = None, match: str = ""
    ) -> list[PolicyRecord]:
        """A page of policies in the order of tenant and name; the next page begins ``after`` the last one's ``policy``.

        Args:
            match: only policies whose name has this in it.
        """
        key = None if after is None else names.parse_policy(after)
        return self.database.read(lambda c: policies.page(c, tenant, key, limit, state, match))

    def revisions(self, policy: str, after: int = 0, limit: int = 1000) -> list[Revision]:
        """A page of a policy's revisions by number."""
        return self._look(policy, lambda c, row: policies.revision_page(c, row, after, limit))

    def revision(self, policy: str, which: int | str) -> Revision:
        """One revision: by number, alias, digest or full name; retired ones too."""
        return self._look(policy, lambda c, row: policies.as_revision(row, policies.revision(c, row, which)))

    # Sessions

    def open_session(
        self,
        policy: str,
        owner: str,
        seconds: float = 60.0,
        *,
        force: bool = False,
        instead_of: str | None = None,
        by: str | None = None,
        why: str = "",
    ) -> Session:
        """Takes the right to write a policy.

        Args:
            owner: the same owner may take its own session over at once.
            seconds: after so long without ``renew_session`` another owner may take over.
            force: take over from anybody.
            instead_of: take over from owners whose name begins so, who are known to have ended: a job that was killed.

        Raises:
            UserError: another owner's session is open.
        """
        opened = self._change(
            policy, lambda c, author, row: sessions.start(c, author, row, owner, seconds, force, instead_of), by, why, active=True
        )
        if isinstance(opened, UserError):
            raise opened
        return opened

    def renew_session(self, session: Session, seconds: float = 60.0) -> Session:
        """Postpones a session's expiry.

        Raises:
            UserError: a newer session fenced it off.
        """
        return self._change(session.policy, lambda c, author, row: sessions.renew(c, author, row, session, seconds))

    def close_session(self, session: Session, *, by: str | None = None, why: str = "") -> None:
        """Gives the right to write back."""
        self._change(session.policy, lambda c, author, row: sessions.finish(c, author, row, session), by, why)

    # Revisions

    def export(
        self,
        policy: str,
        data: Buffer,
        step: int,
        *,
        session: Session | None = None,
        origin: str = "",
        create: bool = False,
        force: bool = False,
        by: str | None = None,
        why: str = "",
    ) -> Revision:
        """Makes a packed adapter a revision, which ``latest`` then names; see ``export_many``."""
        return self.export_many([Export(policy, data, step, session, origin, force)], create=create, by=by, why=why)[0]

    def export_many(self, items: Sequence[Export], *, create: bool = False, by: str | None = None, why: str = "") -> list[Revision]:
        """Makes packed adapters revisions, all or none of them, durable and visible when it returns.

        Args:
            create: make policies that do not exist, with their first adapter's schema.

        Raises:
            UserError: a policy is unknown, retired or written by another session; an adapter is not of its policy's schema,
                or has NaN or infinite weights and is not forced; storage or database cannot be written.
        """
        if not items:
            return []
        author = self._author(by, why)
        prepared = [exports.prepare(*names.parse_policy(item.policy), item) for item in items]
        objects = {ready.digest: item.data for ready, item in zip(prepared, items)}
        return exports.store_and_commit(
            self.database, self.store, objects, lambda c, places: exports.commit(c, author, prepared, places, create)
        )

    def resolve(self, name: str, tenant: str | None = None) -> Resolved:
        """What a name stands for now.

        Args:
            tenant: whose names these are: plain names are this tenant's, others' are refused, digests among its own only.

        Raises:
            UserError: unknown, ambiguous or retired.
        """
        named = names.parse_revision(name, tenant)
        return self.database.read(lambda c: lookup.resolve(c, named, name))

    def resolve_many(self, texts: Sequence[str], tenant: str | None = None) -> list[Resolved]:
        """``resolve`` of many names, in their order."""
        named = [names.parse_revision(text, tenant) for text in texts]
        return self.database.read(lambda c: lookup.resolve_many(c, named, list(texts)))

    def holds(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """For each (policy, digest): whether the policy has a revision of these very bytes, a retired one too."""
        keys = [(*names.parse_policy(policy), bytes.fromhex(digest)) for policy, digest in pairs]
        found = self.database.read(lambda c: lookup.held(c, set(keys)))
        return [key in found for key in keys]

    def load(self, name: str, tenant: str | None = None) -> np.ndarray:
        """The packed object a name stands for, ``uint8``, read-only, its digest verified; memory-mapped from a folder.

        Raises:
            UserError: unknown name, or bytes that are not what the digest says.
        """
        found = self.resolve(name, tenant)
        return self._read(found.digest, lambda: self.resolve(found.digest, tenant).place, found.place)

    def _read(self, digest: str, where: Callable[[], Place], place: Place | None = None, verified: bool = True) -> np.ndarray:
        place, expected = where() if place is None else place, digest if verified else None
        try:
            return self.store.read(place, expected)
        except PackMissing:  # compaction may have moved it since
            moved = where()
            if moved == place:
                raise
            return self.store.read(moved, expected)
        except PackDamaged as error:
            raise UserError(f"payload {digest[:12]} is damaged: {error}; export it again, or roll back") from None

    def _payload(self, digest: str, verified: bool = True) -> np.ndarray:
        return self._read(digest, lambda: self.database.read(lambda c: lookup.place_of(c, digest)), verified=verified)

    # Aliases

    def promote(self, policy: str, revision: int | str, alias: str = "serving", *, by: str | None = None, why: str = "") -> Alias:
        """Points an alias at a live revision of the policy."""
        alias = names.clean_alias(alias)

        def body(connection, author, row):
            return aliases.promote(connection, author, row, policies.revision(connection, row, revision, live=True), alias)

        return self._change(policy, body, by, why, active=True)

    def rollback(self, policy: str, alias: str = "serving", *, to: int | str | None = None, by: str | None = None, why: str = "") -> Alias:
        """Points an alias back, at the revision it named before, or at ``to``, which it must have named before."""
        alias = names.clean_alias(alias)

        def body(connection, author, row):
            target = None if to is None else policies.revision(connection, row, to, live=True)
            return aliases.rollback(connection, author, row, alias, target)

        return self._change(policy, body, by, why, active=True)

    def aliases(self, policy: str) -> list[Alias]:
        """All aliases of a policy by name."""
        return self._look(policy, aliases.listing)

    def aliases_of(self, records: Sequence[PolicyRecord]) -> dict[str, list[str]]:
        """``alias@number`` of all aliases of these policies, by their full names."""
        found = self.database.read(lambda c: aliases.of_many(c, [one.id for one in records]))
        return {one.policy: found.get(one.id, []) for one in records}

    def history(self, policy: str, alias: str = "serving", *, after: int = 0, limit: int = 1000) -> list[AuditEntry]:
        """The moves of an alias, oldest first; the next page begins ``after`` the last one's id."""
        alias = names.clean_alias(alias)
        return self._look(policy, lambda c, row: audit.entries(c, row.id, alias, after, limit))

    def alias_at(self, policy: str, alias: str, time: float) -> Alias | None:
        """What an alias was at a time, None before its first move."""
        alias = names.clean_alias(alias)
        return self._look(policy, lambda c, row: aliases.at_time(c, row, alias, time))

    def audit(self, policy: str | None = None, *, after: int = 0, limit: int = 1000) -> list[AuditEntry]:
        """The audit log in order, of one policy or of all; the next page begins ``after`` the last one's id."""
        if policy is None:
            return self.database.read(lambda c: audit.entries(c, None, None, after, limit))
        return self._look(policy, lambda c, row: audit.entries(c, row.id, None, after, limit))

    # Branching, retiring, keeping

    def branch(self, name: str, revision: str, *, keep_last: int | None = None, by: str | None = None, why: str = "") -> PolicyRecord:
        """Makes policy ``name``, which begins with the bytes of a revision of another policy, ``policy@…`` or a digest."""
        key, found = names.parse_policy(name), self.resolve(revision)

        def body(connection, author, row):
            branches.branch(connection, author, row, policies.revision(connection, row, found.number, live=True), *key, keep_last)
            return policies.record(connection, *key)

        return self._change(found.policy, body, by, why, active=True)

    def retire(self, policy: str, revision: int | str | None = None, *, by: str | None = None, why: str = "") -> None:
        """Takes a policy, or one of its revisions, out of use: it no longer resolves, and ``gc`` may remove the revision."""
        self._set_state(policy, revision, "retired", by, why)

    def restore(self, policy: str, revision: int | str | None = None, *, by: str | None = None, why: str = "") -> None:
        """Undoes ``retire``, for a revision as long as ``gc`` has not removed it."""
        self._set_state(policy, revision, "active" if revision is None else "live", by, why)

    def _set_state(self, policy: str, revision: int | str | None, state: str, by: str | None, why: str) -> None:
        def body(connection, author, row):
            if revision is None:
                policies.set_state(connection, author, row, state)
            else:
                policies.set_revision_state(connection, author, row, policies.revision(connection, row, revision), state)

        self._change(policy, body, by, why)

    def pin(self, policy: str, revision: int | str, *, by: str | None = None, why: str = "") -> None:
        """Keeps a revision whatever retention says."""
        self._set_pinned(policy, revision, True, by, why)

    def unpin(self, policy: str, revision: int | str, *, by: str | None = None, why: str = "") -> None:
        """Undoes ``pin``."""
        self._set_pinned(policy, revision, False, by, why)

    def _set_pinned(self, policy: str, revision: int | str, pinned: bool, by: str | None, why: str) -> None:
        def body(connection, author, row):
            policies.set_pinned(connection, author, row, policies.revision(connection, row, revision), pinned)

        self._change(policy, body, by, why)

    def keep_last(self, policy: str, keep_last: int | None, *, by: str | None = None, why: str = "") -> list[retention.Kept]:
        """Changes how many of the newest revisions ``gc`` keeps; returns the older ones that it keeps all the same, with the reasons."""
        key = names.parse_policy(policy)

        def body(connection, author, row):
            policies.set_keep_last(connection, author, row, keep_last)
            return retention.kept_beyond(connection, author, policies.find(connection, *key))

        return self._change(policy, body, by, why)

    def lease(self, name: str, owner: str, seconds: float = 60.0, tenant: str | None = None) -> Lease:
        """Keeps the bytes a name stands for now from being removed, until released or expired."""
        if self.database.read_only:
            return self.lease_many([self.resolve(name, tenant).digest], owner, seconds)[0]
        named, author = names.parse_revision(name, tenant), self._author(None, "")
        return self.database.write(lambda c: leases.add(c, author, lookup.resolve(c, named, name).digest, owner, seconds))

    def lease_many(self, digests: Sequence[str], owner: str, seconds: float = 60.0) -> list[Lease]:
        """Leases on payloads, in one transaction: all of them or none.

        A catalog that can only be read notes none: there gc's grace period is what a reader has.
        """
        author = self._author(None, "")
        if self.database.read_only:
            return [Lease(0, digest, owner, author.now + seconds) for digest in digests]
        return self.database.write(lambda c: [leases.add(c, author, digest, owner, seconds) for digest in digests])

    def renew_lease(self, lease: Lease, seconds: float = 60.0) -> Lease:
        """Postpones a lease's expiry."""
        author = self._author(None, "")
        if self.database.read_only:
            return Lease(0, lease.digest, lease.owner, author.now + seconds)
        return self.database.write(lambda c: leases.renew(c, author, lease, seconds))

    def release(self, *held: Lease) -> None:
        """Ends leases, in one transaction."""

        def body(connection):
            for lease in held:
                leases.release(connection, lease)

        if not self.database.read_only:
            self.database.write(body)

    def read_leased(self, lease: Lease, verified: bool = True) -> np.ndarray:
        """The packed object that a lease keeps, as ``load`` gives it; also after its revision was retired.

        Args:
            verified: hold the bytes against the digest; off for a caller that does so itself, as residency does.
        """
        return self._payload(lease.digest, verified)

    # Training

    def checkpoint(
        self,
        policy: str,
        step: int,
        place: str,
        *,
        session: Session | None = None,
        keep: int | None = None,
        by: str | None = None,
        why: str = "",
    ) -> TrainingCheckpoint:
        """Notes that a training checkpoint is committed at ``place``.

        Args:
            keep: the records of all but this many newest checkpoints are forgotten, as their files are.
        """
        return self._change(
            policy, lambda c, author, row: training.add_checkpoint(c, author, row, step, place, session, keep), by, why, active=True
        )

    def checkpoints(self, policy: str, limit: int = 100) -> list[TrainingCheckpoint]:
        """A policy's checkpoints, the newest first."""
        return self._look(policy, lambda c, row: training.checkpoint_page(c, row, limit))

    def rollout(
        self,
        policy: str,
        step: int,
        data: Buffer,
        *,
        tokens: int,
        mean_reward: float,
        session: Session | None = None,
        by: str | None = None,
        why: str = "",
    ) -> RolloutRecord:
        """Stores a rollout object: tokens, logprobs, rewards and the revision of each token."""
        key, author = names.parse_policy(policy), self._author(by, why)
        digest = bytes.fromhex(digest_of(data))

        def body(connection, places):
            row = policies.lock(connection, *key, active=True)
            exports.add_payloads(connection, author, {digest: None}, places)
            return training.add_rollout(connection, author, row, step, digest, tokens, mean_reward, session)

        return exports.store_and_commit(self.database, self.store, {digest: data}, body)

    def rollouts(self, policy: str, limit: int = 100) -> list[RolloutRecord]:
        """A policy's rollout records, the newest first; ``read_rollout`` gives the bytes."""
        return self._look(policy, lambda c, row: training.rollout_page(c, row, limit))

    def read_rollout(self, record: RolloutRecord) -> np.ndarray:
        """The rollout object, ``uint8``, read-only, its digest verified."""
        return self._payload(record.digest)

    def drop_rollouts(self, policy: str, before_step: int, *, by: str | None = None, why: str = "") -> int:
        """Forgets rollouts of earlier steps; ``gc`` then frees their bytes."""
        return self._change(policy, lambda c, author, row: training.drop_rollouts(c, author, row, before_step), by, why)

    # Evaluations

    def record_evaluation(
        self,
        revision: str,
        *,
        renderer: str,
        scorer: str,
        dataset: str,
        seed: int,
        metrics: dict[str, Any],
        isolated: float,
        shared: float,
        tolerance: float = 0.0,
        by: str | None = None,
        why: str = "",
    ) -> Evaluation:
        """Notes a score of a revision.

        Args:
            dataset: digest of the data.
            isolated, shared: the score with the revision loaded alone, and in a batch with others.
            tolerance: by how much the two may differ.

        Raises:
            UserError: they differ by more.
        """
        found = self.resolve(revision)
        values = {
            "renderer": renderer,
            "scorer": scorer,
            "dataset": dataset,
            "seed": seed,
            "metrics": metrics,
            "isolated": isolated,
            "shared": shared,
        }

        def body(connection, author, row):
            return evaluations.add(connection, author, row, policies.revision(connection, row, found.number), values, tolerance)

        return self._change(found.policy, body, by, why)

    def evaluations(self, name: str, limit: int = 1000) -> list[Evaluation]:
        """Scores of a policy (``policy``) or of the bytes of one revision (``policy@…``, digest)."""
        if "@" in name or names.is_digest(name):
            digest = self.resolve(name).digest
            return self.database.read(lambda c: evaluations.of_revision(c, digest, limit))
        return self._look(name, lambda c, row: evaluations.of_policy(c, row, limit))

    # Operations

    def begin_operation(self, kind: str, key: str, request: Any = None, tenant: str = names.DEFAULT_TENANT) -> tuple[Operation, bool]:
        """The operation of a key, and whether this call began it; a retry finds the first one, with its result if it has one.

        Raises:
            UserError: the key was used for another request.
        """
        author, fresh_id = self._author(None, ""), uuid.uuid4().hex
        return self.database.write(lambda c: operations.begin(c, author, tenant, kind, key, request, fresh_id))

    def finish_operation(self, id: str, result: Any = None, error: str | None = None) -> Operation:
        """Writes how an operation ended. Saying the same again is fine, something else is refused."""
        author = self._author(None, "")
        return self.database.write(lambda c: operations.finish(c, author, id, result, error))

    def operation(self, id: str) -> Operation:
        """An operation by its id."""
        return self.database.read(lambda c: operations.get(c, id))

    # Upkeep

    def verify(self, name: str | None = None, progress: Callable[[int, int], None] | None = None) -> Iterator[verify.Finding]:
        """What is damaged: in one revision, or anywhere. Nothing is changed.

        Args:
            progress: called with payloads and bytes checked so far, where everything is checked.
        """
        if name is None:
            return verify.verify_all(self.database, self.store, progress)
        return verify.verify_one(self.database, self.store, self.resolve(name))

    def gc(
        self,
        *,
        dry_run: bool = False,
        compact: bool = True,
        grace_s: float = 3600.0,
        operations_s: float = 30 * 86400.0,
        accept_losses: bool = False,
        by: str | None = None,
        why: str = "",
        progress: sweep.Tell | None = None,
    ) -> sweep.Report:
        """Removes what retention gives up and nothing names, and says what it was.

        Args:
            dry_run: only say.
            compact: join small and mostly dead packs too.
            grace_s: how long a pack's file stays after its last payload went, and how long a writer may take to write and
                commit; shorten it only while no process writes.
            operations_s: how long ended operations are kept.
            accept_losses: collect also where the database has lost commits, whose payloads nothing names any more.
            progress: called with what is looked at, how many so far, and of how many.

        Raises:
            UserError: the database is damaged, or has lost commits.
        """
        author = self._author(by, why)
        if accept_losses and not dry_run:
            self.database.write(lambda c: lost_commits.accept(c, author))
        report = sweep.collect(self.database, self.store, author, grace_s, operations_s, dry_run, progress)
        if compact:
            compaction.compact(self.database, self.store, author, report, progress)
        return report

    def compact(self, *, dry_run: bool = False, by: str | None = None, why: str = "") -> sweep.Report:
        """Joins small and mostly dead packs; ``gc`` removes the old files after its grace period."""
        report = sweep.Report(dry_run)
        compaction.compact(self.database, self.store, self._author(by, why), report)
        return report

    def recover(
        self,
        template: str = recovery.TEMPLATE,
        *,
        dry_run: bool = False,
        grace_s: float = 3600.0,
        by: str | None = None,
        why: str = "",
        progress: Callable[[int], None] | None = None,
    ) -> recovery.Recovered:
        """Makes revisions of adapters whose payloads are there and that no record names, as after a loss of the database.

        Args:
            template: of their policies' names, with ``{digest}``.
            grace_s: how long a writer may take to commit what it has written.
            progress: called with the number of packs looked at.
        """
        report = recovery.Recovered(dry_run)
        found = recovery.find(self.database, self.store, template, self._clock() - grace_s, report, progress)
        while some := list(itertools.islice(found, recovery.BATCH)):
            if not dry_run:
                self.export_many(some, create=True, by=by, why=why)
        return report

    def stats(self) -> dict[str, int]:
        """Counts and bytes of what the catalog holds."""
        return self.database.read(stats.count)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
