"""Garbage collection: revisions beyond retention, payloads that nothing names, packs without
payloads, abandoned packs.

Three rules keep a reader or a writer that runs meanwhile safe. A payload row goes only in a
transaction that has locked it and then saw that nothing names it; an exporter that counted on it
finds it missing in its own transaction and stores the bytes again. A pack's file goes only a grace
period after its last payload did, so a reader that resolved before can still read. A pack that no
row names is first entered as swept: its writer, if it lives, can no longer commit it.

Compaction moves payloads of small or mostly dead packs together into large ones: copy, one
transaction that moves the places, and the old packs wait their grace period like any that lost
their payloads.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import sqlalchemy as sa

from mint_jax.catalog.records import audit, retention, sessions
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import Database, chunks, insert_new
from mint_jax.catalog.records.payload_rows import enter_packs
from mint_jax.catalog.records.retention import Expendable
from mint_jax.catalog.records.tables import leases as lease_table
from mint_jax.catalog.records.tables import operations as operation_table
from mint_jax.catalog.records.tables import packs, payloads, revisions, rollouts
from mint_jax.catalog.records.work import remove_ended
from mint_jax.catalog.storage.payloads import PackDamaged, PackMissing, PayloadStore, Place
from mint_jax.catalog.upkeep.recovery import lost_commits
from mint_jax.errors import UserError

T = TypeVar("T")
OnProgress = Callable[[str, int, int], None]  # what is looked at, how many so far, of how many


@dataclasses.dataclass
class Report:
    """What was removed, or would be.

    Attributes:
        revisions: as ``policy@number``.
        payloads: objects that nothing names any more, and their ``payload_bytes``.
        packs: files removed, and their ``pack_bytes``; ``abandoned`` of them were never committed.
        leftovers: other files that killed writers left.
        waiting: packs whose grace period has begun or goes on, and their ``waiting_bytes``.
        moved: payloads that compaction copied out of small or mostly dead packs, and their
            ``moved_bytes``.
    """

    dry_run: bool
    revisions: list[str] = dataclasses.field(default_factory=list)
    payloads: int = 0
    payload_bytes: int = 0
    packs: int = 0
    pack_bytes: int = 0
    abandoned: int = 0
    leftovers: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    leases: int = 0
    operations: int = 0
    moved: int = 0
    moved_bytes: int = 0


def chunks_with_progress(
    progress: OnProgress | None, what: str, items: Sequence[T], size: int = 500
) -> Iterator[Sequence[T]]:
    """``chunks``, reporting how far they are."""
    for k, some in enumerate(chunks(items, size)):
        yield some
        if progress is not None:
            progress(what, k * size + len(some), len(items))


def collect(
    database: Database,
    store: PayloadStore,
    author: Author,
    grace_s: float,
    operations_s: float,
    dry_run: bool,
    progress: OnProgress | None = None,
) -> Report:
    """Removes all that may go, in transactions of bounded size; with ``dry_run`` only says so.

    Raises:
        UserError: the database is damaged, or has lost commits: what they named would look unnamed.
    """
    report = Report(dry_run)
    if not dry_run and (damage := database.damage(1)):
        raise UserError(
            f"database {database.name} is damaged ({damage[0]}): nothing was removed; restore it"
            " from a backup, then collect"
        )
    if not dry_run and (lost := database.read(lost_commits)):
        raise UserError(
            f"database {database.name}: {lost[0]}; nothing was removed, for the payloads of what is"
            " lost may still be there"
        )
    if dry_run:
        _foresee(database, author, report, operations_s, grace_s, progress)
    else:
        report.leases = database.write(lambda c: sessions.remove_expired_leases(c, author))
        report.operations = database.write(lambda c: remove_ended(c, author.now - operations_s))
        for some in chunks_with_progress(
            progress, "policies", database.read(retention.candidates), 100
        ):
            gone = database.write(lambda c, some=some: retention.remove(c, author, some))
            report.revisions += [f"{one.policy}@{one.number}" for one in gone]
        for some in chunks_with_progress(
            progress, "payloads", database.read(lambda c: _unnamed(c, author))
        ):
            count, size = database.write(lambda c, some=some: _remove_payloads(c, author, some))
            report.payloads, report.payload_bytes = (
                report.payloads + count,
                report.payload_bytes + size,
            )
        database.write(lambda c: retire_packs(c, author))
    _sweep_dead(database, store, author, grace_s, report, progress)
    _sweep_abandoned(database, store, author, grace_s, report, progress)
    report.leftovers = len(store.sweep(grace_s, dry_run))
    return report


def _nothing_names(author: Author) -> sa.ColumnElement[bool]:
    return sa.not_(
        sa.or_(
            sa.exists().where(revisions.c.digest == payloads.c.digest),
            sa.exists().where(rollouts.c.digest == payloads.c.digest),
            sa.exists().where(
                lease_table.c.digest == payloads.c.digest, lease_table.c.expires_at > author.now
            ),
        )
    )


def _unnamed(connection: sa.Connection, author: Author) -> list[bytes]:
    return list(
        connection.scalars(
            sa.select(payloads.c.digest).where(_nothing_names(author)).order_by(payloads.c.digest)
        )
    )


def _remove_payloads(
    connection: sa.Connection, author: Author, digests: Sequence[bytes]
) -> tuple[int, int]:
    mine = payloads.c.digest.in_(digests)
    connection.execute(
        sa.select(payloads.c.digest).where(mine).order_by(payloads.c.digest).with_for_update()
    )
    # A new statement: it sees what was committed while the locks were waited for.
    found = dict(
        connection.execute(
            sa.select(payloads.c.digest, payloads.c.length).where(mine, _nothing_names(author))
        )
        .tuples()
        .all()
    )
    # expired ones
    connection.execute(lease_table.delete().where(lease_table.c.digest.in_(list(found))))
    connection.execute(payloads.delete().where(payloads.c.digest.in_(list(found))))
    if found:
        audit.append(
            connection,
            audit.row(
                author, "remove payloads", details={"digests": sorted(d.hex() for d in found)}
            ),
        )
    return len(found), sum(found.values())


def retire_packs(connection: sa.Connection, author: Author) -> int:
    """Marks packs without payloads dead; their grace period begins."""
    empty = sa.and_(packs.c.state == "live", ~sa.exists().where(payloads.c.pack_id == packs.c.id))
    return connection.execute(
        packs.update().where(empty).values(state="dead", changed_at=author.now)
    ).rowcount


def _foresee(
    database: Database,
    author: Author,
    report: Report,
    operations_s: float,
    grace_s: float,
    progress: OnProgress | None,
) -> None:
    """Fills in what the database part of ``collect`` would remove."""

    def count(connection: sa.Connection) -> None:
        report.leases = (
            connection.scalar(
                sa.select(sa.func.count()).where(lease_table.c.expires_at <= author.now)
            )
            or 0
        )
        ended = operation_table.c.finished_at < author.now - operations_s
        report.operations = connection.scalar(sa.select(sa.func.count()).where(ended)) or 0

    database.read(count)
    gone: list[Expendable] = []
    for some in chunks_with_progress(
        progress, "policies", database.read(retention.candidates), 100
    ):
        gone += database.read(
            lambda c, some=some: [
                one for _, found in retention.expendable(c, author, some) for one in found
            ]
        )
    report.revisions = [f"{one.policy}@{one.number}" for one in gone]
    removed: dict[bytes, int] = {}
    for one in gone:
        removed[one.digest] = removed.get(one.digest, 0) + 1
    unnamed = set(database.read(lambda c: _unnamed(c, author)))
    for some in chunks(sorted(removed)):
        unnamed |= database.read(lambda c, some=some: _left_unnamed(c, author, some, removed))
    report.payloads = len(unnamed)
    for some in chunks(sorted(unnamed)):
        query = sa.select(sa.func.sum(payloads.c.length)).where(payloads.c.digest.in_(some))
        report.payload_bytes += int(database.read(lambda c, query=query: c.scalar(query)) or 0)
    sizes = database.read(lambda c: _emptied(c, unnamed))
    if grace_s > 0:
        report.waiting, report.waiting_bytes = len(sizes), sum(sizes)
    else:
        report.packs, report.pack_bytes = len(sizes), sum(sizes)


def _emptied(connection: sa.Connection, gone: set[bytes]) -> list[int]:
    """Bytes of each live pack that has no payloads, or only such as will be gone."""
    left = {
        row.id: (row.bytes, row.held)
        for row in connection.execute(
            sa.select(packs.c.id, packs.c.bytes, sa.func.count(payloads.c.digest).label("held"))
            .join_from(packs, payloads, isouter=True)
            .where(packs.c.state == "live")
            .group_by(packs.c.id, packs.c.bytes)
        )
    }
    for some in chunks(sorted(gone)):
        query = (
            sa.select(payloads.c.pack_id, sa.func.count())
            .where(payloads.c.digest.in_(some))
            .group_by(payloads.c.pack_id)
        )
        for pack, count in connection.execute(query).tuples():
            if pack in left:
                left[pack] = (left[pack][0], left[pack][1] - count)
    return [size for size, count in left.values() if count == 0]


def _left_unnamed(
    connection: sa.Connection, author: Author, digests: Sequence[bytes], removed: dict[bytes, int]
) -> set[bytes]:
    query = (
        sa.select(revisions.c.digest, sa.func.count())
        .where(revisions.c.digest.in_(digests))
        .group_by(revisions.c.digest)
    )
    freed = {digest for digest, number in connection.execute(query) if number == removed[digest]}
    held = set(connection.scalars(sa.select(rollouts.c.digest).where(rollouts.c.digest.in_(freed))))
    leased = lease_table.c.expires_at > author.now
    return (
        freed
        - held
        - set(
            connection.scalars(
                sa.select(lease_table.c.digest).where(lease_table.c.digest.in_(freed), leased)
            )
        )
    )


def _sweep_dead(
    database: Database,
    store: PayloadStore,
    author: Author,
    grace_s: float,
    report: Report,
    progress: OnProgress | None,
) -> None:
    dead = database.read(
        lambda c: list(
            c.execute(sa.select(packs).where(packs.c.state == "dead").order_by(packs.c.id))
        )
    )
    for [pack] in chunks_with_progress(progress, "dead packs", dead, 1):
        if pack.changed_at > author.now - grace_s:
            report.waiting, report.waiting_bytes = (
                report.waiting + 1,
                report.waiting_bytes + pack.bytes,
            )
            # the clock was set back: the period begins now
            if pack.changed_at > author.now and not report.dry_run:
                restart = packs.update().where(packs.c.id == pack.id).values(changed_at=author.now)
                database.write(lambda c, restart=restart: c.execute(restart))
            continue
        if not report.dry_run:
            store.delete(pack.name)
            database.write(
                lambda c, pack=pack: c.execute(
                    packs.delete().where(packs.c.id == pack.id, packs.c.state == "dead")
                )
            )
        report.packs, report.pack_bytes = report.packs + 1, report.pack_bytes + pack.bytes


def _sweep_abandoned(
    database: Database,
    store: PayloadStore,
    author: Author,
    grace_s: float,
    report: Report,
    progress: OnProgress | None,
) -> None:
    old = [pack for pack in store.packs() if pack.mtime < author.now - grace_s]
    for some in chunks_with_progress(progress, "packs", old):
        names = [pack.name for pack in some]
        live = database.read(lambda c, names=names: _named(c, names))
        strays = [pack for pack in some if pack.name not in live]
        if strays and not report.dry_run:
            rows = [
                {"name": pack.name, "bytes": pack.bytes, "state": "swept", "changed_at": author.now}
                for pack in strays
            ]

            def enter(connection: sa.Connection, rows: list[dict] = rows) -> set[str]:
                insert_new(connection, packs, rows)
                return _named(connection, [row["name"] for row in rows])

            committed = database.write(enter)
            strays = [pack for pack in strays if pack.name not in committed]
            for pack in strays:
                store.delete(pack.name)
            details = {"packs": [pack.name for pack in strays]}
            database.write(
                lambda c, details=details: audit.append(
                    c, audit.row(author, "sweep abandoned packs", details=details)
                )
            )
        report.abandoned += len(strays)
        report.packs += len(strays)
        report.pack_bytes += sum(pack.bytes for pack in strays)


def _named(connection: sa.Connection, names: Sequence[str]) -> set[str]:
    """Those packs that a writer has committed and that are not swept."""
    return set(
        connection.scalars(
            sa.select(packs.c.name).where(packs.c.name.in_(names), packs.c.state != "swept")
        )
    )


SMALL = 8 << 20  # bytes; a pack below is worth joining with others
LARGE = 256 << 20  # bytes that one new pack holds at most, unless one object is larger
_MOVED = payloads.update().where(payloads.c.digest == sa.bindparam("of"))
_MOVED = _MOVED.values(pack_id=sa.bindparam("pack"), offset=sa.bindparam("at"))


def compact(
    database: Database,
    store: PayloadStore,
    author: Author,
    report: Report,
    progress: OnProgress | None = None,
) -> None:
    """Moves payloads; adds to ``report.moved`` and ``report.moved_bytes``."""
    for [batch] in chunks_with_progress(
        progress, "joins of packs", list(_batches(database.read(_candidates))), 1
    ):
        rows = [
            row
            for some in chunks(batch)
            for row in database.read(lambda c, some=some: _payloads(c, some))
        ]
        if report.dry_run:
            report.moved, report.moved_bytes = (
                report.moved + len(rows),
                report.moved_bytes + sum(row.length for row in rows),
            )
            continue
        kept = [row for row in rows if _whole(store, row)]
        if not kept:
            continue
        places = store.copy([_place(row) for row in kept], [row.digest.hex() for row in kept])
        moved = database.write(lambda c, kept=kept, places=places: _move(c, author, kept, places))
        report.moved, report.moved_bytes = (
            report.moved + len(moved),
            report.moved_bytes + sum(moved),
        )


def _candidates(connection: sa.Connection) -> list[sa.Row]:
    used = sa.func.sum(payloads.c.length)
    query = (
        sa.select(packs.c.id, packs.c.bytes, used.label("used"))
        .join(payloads)
        .where(packs.c.state == "live")
    )
    query = query.group_by(packs.c.id, packs.c.bytes).having(
        sa.or_(packs.c.bytes < SMALL, used * 2 < packs.c.bytes)
    )
    return list(connection.execute(query.order_by(packs.c.id)))


def _batches(found: list[sa.Row]) -> Iterator[list[int]]:
    """Packs to join; a lone one only if it is mostly dead."""
    batch: list[sa.Row] = []
    size = 0
    for pack in [*found, None]:
        if pack is None or (batch and size + pack.used > LARGE):
            if len(batch) > 1 or any(one.used * 2 < one.bytes for one in batch):
                yield [one.id for one in batch]
            batch, size = [], 0
        if pack is not None:
            batch.append(pack)
            size += pack.used


def _payloads(connection: sa.Connection, pack_ids) -> list[sa.Row]:
    query = (
        sa.select(payloads, packs.c.name.label("pack")).join(packs).where(packs.c.id.in_(pack_ids))
    )
    return list(connection.execute(query.order_by(payloads.c.pack_id, payloads.c.offset)))


def _place(row: sa.Row) -> Place:
    return Place(row.pack, row.offset, row.length)


def _whole(store: PayloadStore, row: sa.Row) -> bool:
    """Whether the bytes are what their digest says; damaged ones stay where they are, for
    ``verify`` to name.
    """
    try:
        store.read(_place(row), row.digest.hex())
    except (PackMissing, PackDamaged):
        return False
    return True


def _move(
    connection: sa.Connection, author: Author, rows: list[sa.Row], places: list[Place]
) -> list[int]:
    """Points payloads at their new places, and returns the lengths of those that were still at the
    old ones.
    """
    ids = enter_packs(connection, author, places)
    moved: list[int] = []
    for some in chunks([(row, place) for row, place in zip(rows, places) if place.pack in ids]):
        # Locked and seen in one statement, then moved by one compiled statement for all: an UPDATE
        # with its own condition for each payload is built anew each time, which was most of a
        # collection's time (5,100 payloads: 1.2 of 1.6 s).
        mine = payloads.c.digest.in_([row.digest for row, _ in some])
        query = (
            sa.select(payloads.c.digest, payloads.c.pack_id)
            .where(mine)
            .order_by(payloads.c.digest)
            .with_for_update()
        )
        where = dict(connection.execute(query).tuples().all())
        still = [(row, place) for row, place in some if where.get(row.digest) == row.pack_id]
        if still:
            connection.execute(
                _MOVED,
                [
                    {"of": row.digest, "pack": ids[place.pack], "at": place.offset}
                    for row, place in still
                ],
            )
        moved += [row.length for row, _ in still]
    retire_packs(connection, author)
    details = {
        "from": sorted({row.pack for row in rows}),
        "to": sorted(ids),
        "payloads": len(moved),
    }
    audit.append(connection, audit.row(author, "compact", details=details))
    return moved
