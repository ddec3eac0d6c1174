"""Exports: packed adapters become revisions.

The payloads are durable first; then one transaction makes the revisions visible. The new bytes of
all exports in a call become one pack and their rows one transaction: either all are revisions
afterwards or none. Bytes that the policy already has at that step make no second revision, so an
export may be repeated after a crash; ``latest`` points at it again.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Unpack

import sqlalchemy as sa

from mint_jax import nested
from mint_jax.catalog.packed import Buffer, as_bytes, digest_of, unpack
from mint_jax.catalog.records import names, policies, sessions
from mint_jax.catalog.records.aliases import Move, write_moves
from mint_jax.catalog.records.audit import Author, Signed
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.handle import POLICIES, Handle, check_active
from mint_jax.catalog.records.lookup import Revision, as_revision
from mint_jax.catalog.records.names import LATEST, full_name, note, whole
from mint_jax.catalog.records.payload_rows import add_payloads, store_and_commit
from mint_jax.catalog.records.policies import read_schema
from mint_jax.catalog.records.sessions import Session
from mint_jax.catalog.records.tables import aliases, revisions
from mint_jax.catalog.records.tables import policies as policy_table
from mint_jax.catalog.storage.payloads import Place
from mint_jax.errors import UserError
from mint_jax.lora.finite import all_finite


@dataclasses.dataclass(frozen=True)
class Export:
    """One adapter to export."""

    policy: str  # ``name`` or ``tenant/name``
    data: Buffer  # the packed object
    step: int  # number of optimizer steps done
    session: Session | None = None  # the right to write, if a session is open
    origin: str = ""  # source of the adapter, in words
    force: bool = False  # accept NaN and infinite weights, for debugging
    sampling: Mapping[str, Any] | None = None  # parameters of training rollouts, for evaluations
    training: Mapping[str, float] | None = None  # see ``Revision``
    merge: Mapping[str, Any] | None = None  # see ``Revision``


class Prepared(NamedTuple):
    """An export, checked as far as possible without the database."""

    key: tuple[str, str]  # tenant and name
    export: Export
    digest: bytes
    schema: str
    finite: bool
    columns: dict[str, Any]  # of the revision


def export(
    catalog: Handle,
    policy: str,
    data: Buffer,
    step: int,
    *,
    session: Session | None = None,
    origin: str = "",
    create: bool = False,
    force: bool = False,
    **signed: Unpack[Signed],
) -> Revision:
    """Makes a packed adapter a revision, at which ``latest`` then points; see ``export_many``."""
    item = Export(policy, data, step, session, origin, force)
    return export_many(catalog, [item], create=create, **signed)[0]


def export_many(
    catalog: Handle, items: Sequence[Export], *, create: bool = False, **signed: Unpack[Signed]
) -> list[Revision]:
    """Makes packed adapters revisions, all or none, durable and visible on return. Raises
    ``UserError``: a policy is unknown, retired or written by another session; an adapter does not
    match its policy's schema, or has NaN or infinite weights without ``force``; storage or database
    cannot be written. ``create``: create missing policies, with their first adapter's schema.
    """
    if not items:
        return []
    author = catalog.author(**signed)
    prepared = [prepare(item) for item in items]
    objects = {ready.digest: ready.export.data for ready in prepared}
    return store_and_commit(
        catalog.database,
        catalog.store,
        objects,
        lambda c, places: commit(c, author, prepared, places, create),
    )


def prepare(item: Export) -> Prepared:
    """Checks the bytes and computes their digest. Raises ``UserError``: not a packed adapter, or
    NaN or infinite weights without ``force``.
    """
    key = names.parse_policy(item.policy)
    full, digest = full_name(*key), bytes.fromhex(digest_of(item.data))
    step = whole(f"step of an export of {full!r}", item.step)
    adapter, schema = unpack(item.data)
    wrong = [path for path, leaf in nested.leaves_with_path(adapter) if not all_finite(leaf)]
    if wrong and not item.force:
        raise UserError(
            f"policy {full!r}: {wrong[0]} of the exported adapter has NaN or infinite values: the"
            " run has diverged, export an earlier step, or this one with force"
        )
    columns: dict[str, Any] = {"step": step, "origin": note("origin", item.origin)}
    for name in ("sampling", "training", "merge"):
        facts = getattr(item, name)
        text = None if facts is None else json.dumps(dict(facts), sort_keys=True, allow_nan=False)
        columns[name] = text
    return Prepared(key, item, digest, schema.to_json(), not wrong, columns)


def commit(
    connection: sa.Connection,
    author: Author,
    exports: Sequence[Prepared],
    places: dict[bytes, Place],
    create: bool,
) -> list[Revision]:
    """Writes payloads, revisions, ``latest`` and the audit log; see ``store_and_commit``."""
    ids = policies.schema_ids(connection, {one.schema for one in exports})
    owners = _lock_policies(connection, author, exports, create)
    for one in exports:
        policy = owners[one.key]
        sessions.check_writer(policy, one.export.session)
        if ids[one.schema] != policy.schema_id:
            check_schema(one, policy.json)
    needed: dict[bytes, int | None] = {one.digest: ids[one.schema] for one in exports}
    finite = {one.digest: one.finite for one in exports}
    add_payloads(connection, author, needed, places, finite)
    old = {owners[one.key].id for one in exports if owners[one.key].last_number}
    had = _find_same(connection, old, exports)
    new, chosen = [], []  # rows of new revisions; for each export its policy and revision
    for one in exports:
        policy = owners[one.key]
        key = (policy.id, one.columns["step"], one.digest)
        if key not in had:
            policy.last_number += 1
            had[key] = SimpleNamespace(
                policy_id=policy.id,
                number=policy.last_number,
                digest=one.digest,
                **one.columns,
                created_at=max(author.now, policy.touched_at),
                pinned=False,
                state="live",
            )
            new.append(had[key])
        chosen.append((policy, had[key]))
    if new:
        insert = revisions.insert().returning(revisions.c.id, sort_by_parameter_order=True)
        numbers = connection.scalars(insert, [dict(vars(row)) for row in new])
        for row, number in zip(new, numbers):
            row.id = number
    for one, (_, row) in zip(exports, chosen):
        row.length = as_bytes(one.export.data).size
    _advance_latest(connection, author, chosen)
    return [as_revision(row, policy) for policy, row in chosen]


def _lock_policies(
    connection: sa.Connection, author: Author, exports: Sequence[Prepared], create: bool
) -> dict[tuple[str, str], Any]:
    """Locks the policies of the exports in one order, creating missing ones if ``create``."""
    wanted: dict[tuple[str, str], str] = {}
    for export in exports:
        wanted.setdefault(export.key, export.schema)
    owners = _select_policies(connection, wanted)
    missing = sorted(wanted.keys() - owners.keys())
    if missing and not create:
        unknown = ", ".join(repr(full_name(*key)) for key in missing[:3])
        raise UserError(
            f"policy {unknown} is not in the catalog: create it first, or export with create=True"
        )
    if missing:
        policies.insert(connection, author, {key: wanted[key] for key in missing})
        owners |= _select_policies(connection, missing)
    for policy in owners.values():
        check_active(policy)
    return owners


def _select_policies(
    connection: sa.Connection, keys: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    """Locks policies; returns copies of their rows with revision, number, version of ``latest``."""
    by_id: dict[int, Any] = {}
    key = sa.tuple_(policy_table.c.tenant, policy_table.c.name)
    query = POLICIES.order_by(*key.clauses).with_for_update(of=policy_table)
    for chunk in chunks(sorted(keys)):
        for row in connection.execute(query.where(key.in_(chunk))):
            by_id[row.id] = SimpleNamespace(**row._mapping, latest=(None, None, 0))
    # a new statement sees what was committed while the first one waited for locks
    columns = (aliases.c.policy_id, aliases.c.revision_id, revisions.c.number, aliases.c.version)
    for chunk in chunks([number for number, policy in by_id.items() if policy.last_number]):
        query = sa.select(*columns).join(revisions, aliases.c.revision_id == revisions.c.id)
        query = query.where(aliases.c.policy_id.in_(chunk), aliases.c.name == LATEST)
        for policy_id, *latest in connection.execute(query):
            by_id[policy_id].latest = latest
    return {(policy.tenant, policy.name): policy for policy in by_id.values()}


def _find_same(
    connection: sa.Connection, policy_ids: set[int], exports: Sequence[Prepared]
) -> dict[tuple[int, int, bytes], Any]:
    """Live revisions of these policies with the bytes of the exports, by policy, step, digest."""
    found = {}
    for some in chunks(sorted(policy_ids)):
        for chunk in chunks(sorted({export.digest for export in exports})):
            query = sa.select(revisions).where(
                revisions.c.digest.in_(chunk),
                revisions.c.policy_id.in_(some),
                revisions.c.state == "live",
            )
            for row in connection.execute(query.order_by(revisions.c.id)):
                found[row.policy_id, row.step, row.digest] = SimpleNamespace(**row._mapping)
    return found


def _advance_latest(connection: sa.Connection, author: Author, made: list[tuple[Any, Any]]) -> None:
    """Points ``latest`` at the exports in order."""
    moves = []
    for policy, revision in made:
        before, number, version = policy.latest
        if before != revision.id:  # else exported again
            moves.append(Move(policy, LATEST, revision, number, version + 1, version))
            policy.latest = (revision.id, revision.number, version + 1)
    if not moves:
        return
    steps = [move.target.step for move in moves]
    write_moves(connection, author, moves, "export", step=steps)
    update = policy_table.update().where(policy_table.c.id == sa.bindparam("policy"))
    update = update.values(last_number=sa.bindparam("number"), touched_at=sa.bindparam("at"))
    values = [
        {"policy": one.id, "number": one.last_number, "at": max(author.now, one.touched_at)}
        for one in {move.policy.id: move.policy for move in moves}.values()
    ]
    connection.execute(update, values)


def check_schema(export: Prepared, policy_schema: str) -> None:
    """Raises ``UserError`` unless the bytes have the policy's base and adapter config; the dtype
    may differ.
    """
    own, expected = (
        {"base": one.base, **dataclasses.asdict(one.config)}
        for one in (read_schema(export.schema), read_schema(policy_schema))
    )
    for name, found in own.items():
        if found != expected[name]:
            raise UserError(
                f"policy {full_name(*export.key)!r} has {name} {expected[name]!r}, the exported"
                f" adapter has {found!r}: export it as another policy"
            )
