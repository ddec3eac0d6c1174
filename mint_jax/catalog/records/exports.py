"""Exports: packed adapters become revisions. The payload is durable first, then one transaction
makes the revisions visible.

However many exports are given, their new bytes go to storage as one pack and their rows in one
transaction; either all of them are revisions afterwards or none. Bytes that the policy has already
at that very step make no second revision, so an export may be repeated after a crash; ``latest``
names it again.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import sqlalchemy as sa

from mint_jax import nested
from mint_jax.catalog import header
from mint_jax.catalog.packed import Buffer, Schema, as_bytes, digest_of, schema_digest, unpack
from mint_jax.catalog.records import audit, names, policies, sessions
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import chunks, dialect_insert
from mint_jax.catalog.records.lookup import Lookup
from mint_jax.catalog.records.names import LATEST, full_name, note, whole
from mint_jax.catalog.records.payload_rows import add_payloads, store_and_commit
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.records.revisions import Revision, as_revision, find_revision
from mint_jax.catalog.records.sessions import Session
from mint_jax.catalog.records.tables import (
    alias_checksum,
    aliases,
    payloads,
    revision_checksum,
    revisions,
    schemas,
)
from mint_jax.catalog.records.tables import policies as policy_table
from mint_jax.catalog.storage.payloads import Place
from mint_jax.errors import UserError
from mint_jax.lora.finite import all_finite
from mint_jax.safetensors_header import header_size


@dataclasses.dataclass(frozen=True)
class Export:
    """One adapter to export.

    Attributes:
        policy: ``name`` or ``tenant/name``.
        data: the packed object.
        step: optimizer steps done.
        session: the right to write, where a session is open.
        origin: where it comes from, in words.
        force: take an adapter with NaN or infinite weights too, to look into what went wrong.
        sampling: how training draws the rollouts, for evaluations of the revision.
    """

    policy: str
    data: Buffer
    step: int
    session: Session | None = None
    origin: str = ""
    force: bool = False
    sampling: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An export with what can be known of it without the database."""

    tenant: str
    name: str
    digest: bytes
    length: int
    schema: str
    step: int
    session: Session | None
    origin: str
    finite: bool
    sampling: str | None


class Exports(Lookup):
    """Makes revisions."""

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
        return self.export_many(
            [Export(policy, data, step, session, origin, force)], create=create, by=by, why=why
        )[0]

    def export_many(
        self, items: Sequence[Export], *, create: bool = False, by: str | None = None, why: str = ""
    ) -> list[Revision]:
        """Makes packed adapters revisions, all or none of them, durable and visible when it
        returns.

        Args:
            create: make policies that do not exist, with their first adapter's schema.

        Raises:
            UserError: a policy is unknown, retired or written by another session; an adapter is not
                of its policy's schema, or has NaN or infinite weights and is not forced; storage or
                database cannot be written.
        """
        if not items:
            return []
        author = self._author(by, why)
        prepared = [prepare(*names.parse_policy(item.policy), item) for item in items]
        objects = {ready.digest: item.data for ready, item in zip(prepared, items)}
        return store_and_commit(
            self.database,
            self.store,
            objects,
            lambda c, places: commit(c, author, prepared, places, create),
        )

    def branch(
        self,
        name: str,
        revision: str,
        *,
        keep_last: int | None = None,
        by: str | None = None,
        why: str = "",
    ) -> PolicyRecord:
        """Makes policy ``name``, which begins with the bytes of a revision of another policy,
        ``policy@…`` or a digest.

        The bytes are shared, the histories are not.
        """
        key, found = names.parse_policy(name), self.resolve(revision)

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> PolicyRecord:
            begin = find_revision(connection, row, found.number, live=True)
            made = policies.create(connection, author, *key, read_schema(row.json), keep_last)
            origin = f"branch of {full_name(row.tenant, row.name)}@{begin.number}"
            at = max(author.now, made.touched_at)
            of_bytes = sa.select(schemas.c.digest).join(
                payloads, payloads.c.schema_id == schemas.c.id
            )
            schema = connection.execute(
                of_bytes.where(payloads.c.digest == begin.digest)
            ).scalar_one()
            values = {
                "policy_id": made.id,
                "number": 1,
                "step": begin.step,
                "digest": begin.digest,
                "origin": origin,
                "pinned": False,
                "state": "live",
                "created_at": at,
                "sampling": begin.sampling,
                "checksum": revision_checksum(made.id, 1, begin.digest, schema),
            }
            first = connection.scalar(revisions.insert().returning(revisions.c.id), values)
            latest = {
                "policy_id": made.id,
                "name": LATEST,
                "revision_id": first,
                "version": 1,
                "updated_at": at,
            }
            connection.execute(
                aliases.insert(),
                latest | {"checksum": alias_checksum(made.id, LATEST, 1, 1, begin.digest)},
            )
            mine = policy_table.update().where(policy_table.c.id == made.id)
            connection.execute(mine.values(parent_revision=begin.id, last_number=1))
            fields = {"alias": LATEST, "after": 1, "version": 1, "under": 0}
            audit.append(
                connection,
                audit.row(
                    author,
                    "branch",
                    made,
                    {"digest": begin.digest.hex(), "origin": origin},
                    **fields,
                ),
            )
            return policies.record(connection, *key)

        return self._change(found.policy, body, by, why, active=True)


def prepare(tenant: str, name: str, export: Export) -> Prepared:
    """Digest and schema of the bytes, checked.

    Raises:
        UserError: not a packed adapter, or one with NaN or infinite weights that is not forced.
    """
    step = whole(f"step of an export of {full_name(tenant, name)!r}", export.step)
    data = as_bytes(export.data)
    digest, origin = bytes.fromhex(digest_of(data)), note("origin", export.origin)
    schema = schema_text(data)
    if not (finite := is_finite(data, schema)) and not export.force:
        path = next(
            path for path, leaf in nested.leaves_with_path(unpack(data)[0]) if not all_finite(leaf)
        )
        raise UserError(
            f"policy {full_name(tenant, name)!r}: {path} of the exported adapter has NaN or"
            " infinite values: the run has diverged, export an earlier step, or this one with"
            " force"
        )
    sampling = (
        None
        if export.sampling is None
        else json.dumps(dict(export.sampling), sort_keys=True, allow_nan=False)
    )
    return Prepared(
        tenant, name, digest, data.size, schema, step, export.session, origin, finite, sampling
    )


def is_finite(data: np.ndarray, schema: str) -> bool:
    """Looks at all weights of a packed object at once: they lie back to back behind its header."""
    start = 8 + header_size(data[:8].tobytes(), data.size, header.MAX_HEADER, "its header")
    return all_finite(data[start:].view(header.DTYPES[header.TAGS[read_schema(schema).dtype]]))


def commit(
    connection: sa.Connection,
    author: Author,
    exports: Sequence[Prepared],
    places: dict[bytes, Place],
    create: bool,
) -> list[Revision]:
    """The one transaction: payloads, revisions, ``latest`` and the audit log. See
    ``store_and_commit``.
    """
    ids = policies.schema_ids(connection, {export.schema for export in exports})
    owners = _locked_policies(connection, author, exports, ids, create)
    for export in exports:
        policy = owners[export.tenant, export.name]
        sessions.check_writer(policy, export.session)
        if ids[export.schema] != policy.schema_id:
            check_schema(export, policy.json)
    finite = {export.digest: export.finite for export in exports}
    add_payloads(
        connection,
        author,
        {export.digest: ids[export.schema] for export in exports},
        places,
        finite,
    )
    had = _already_there(
        connection,
        [owners[e.tenant, e.name].id for e in exports if owners[e.tenant, e.name].last_number],
        exports,
    )
    new: dict[tuple[int, int, bytes], dict[str, Any]] = {}
    chosen = []  # per export: its revision's key
    for export in exports:
        policy = owners[export.tenant, export.name]
        key = (policy.id, export.step, export.digest)
        chosen.append(key)
        if key not in had and key not in new:
            policy.last_number += 1
            new[key] = {
                "policy_id": policy.id,
                "number": policy.last_number,
                "step": export.step,
                "digest": export.digest,
                "origin": export.origin,
                "pinned": False,
                "state": "live",
                "created_at": max(author.now, policy.touched_at),
                "sampling": export.sampling,
                "checksum": revision_checksum(
                    policy.id, policy.last_number, export.digest, schema_digest(export.schema)
                ),
            }
    if new:
        insert = revisions.insert().returning(revisions.c.id, sort_by_parameter_order=True)
        for key, number in zip(new, connection.scalars(insert, list(new.values()))):
            had[key] = SimpleNamespace(id=number, **new[key])
    _advance_latest(
        connection,
        author,
        [(owners[e.tenant, e.name], had[key]) for e, key in zip(exports, chosen)],
    )
    results = []
    for export, key in zip(exports, chosen):
        had[key].length = export.length
        results.append(as_revision(owners[export.tenant, export.name], had[key]))
    return results


def _locked_policies(
    connection: sa.Connection,
    author: Author,
    exports: Sequence[Prepared],
    ids: dict[str, int],
    create: bool,
) -> dict[tuple[str, str], Any]:
    """The policies of the exports, locked in one order, with the present move of ``latest``;
    missing ones are made if asked.
    """
    wanted: dict[tuple[str, str], Prepared] = {}
    for export in exports:
        wanted.setdefault((export.tenant, export.name), export)
    owners = _select_policies(connection, wanted)
    missing = [key for key in wanted if key not in owners]
    if missing and not create:
        unknown = ", ".join(repr(full_name(*key)) for key in missing[:3])
        raise UserError(
            f"policy {unknown} is not in the catalog: create it first, or export with create=True"
        )
    if missing:
        rows = []
        for key in sorted(missing):
            schema = read_schema(wanted[key].schema)
            rows.append(policies.new_row(author, *key, schema, ids[wanted[key].schema]))
        insert = (
            dialect_insert(connection, policy_table)
            .on_conflict_do_nothing()
            .returning(policy_table.c.id)
        )
        # the others were made by another writer in this moment
        mine = set(connection.scalars(insert, rows))
        made = _select_policies(connection, dict.fromkeys(missing))
        owners |= made
        new = [policy for policy in made.values() if policy.id in mine]
        policies.seal(connection, [(policy.id, policy.tenant, policy.name) for policy in new])
        audit.append(
            connection,
            *(
                audit.row(author, "create", policy, policies.creation(policy, None))
                for policy in new
            ),
        )
    for policy in owners.values():
        if policy.state != "active":
            raise UserError(
                f"policy {full_name(policy.tenant, policy.name)!r} is retired: restore it first"
            )
    return owners


def _select_policies(
    connection: sa.Connection, keys: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    found = {}
    by_tenant: dict[str, list[str]] = {}
    for tenant, name in keys:
        by_tenant.setdefault(tenant, []).append(name)
    for tenant, some in sorted(by_tenant.items()):
        for chunk in chunks(sorted(some)):
            query = sa.select(policy_table, schemas.c.json).join(schemas)
            query = query.where(
                policy_table.c.tenant == tenant, policy_table.c.name.in_(chunk)
            ).order_by(policy_table.c.name)
            for row in connection.execute(query.with_for_update(of=policy_table)):
                found[row.tenant, row.name] = SimpleNamespace(
                    **row._mapping, latest_id=None, latest_number=None, latest_version=0
                )
    by_id = {policy.id: policy for policy in found.values()}
    for chunk in chunks([number for number, policy in by_id.items() if policy.last_number]):
        query = sa.select(
            aliases.c.policy_id, aliases.c.revision_id, aliases.c.version, revisions.c.number
        )
        query = query.join(revisions, aliases.c.revision_id == revisions.c.id)
        for row in connection.execute(
            query.where(aliases.c.policy_id.in_(chunk), aliases.c.name == LATEST)
        ):
            policy = by_id[row.policy_id]
            policy.latest_id, policy.latest_number, policy.latest_version = (
                row.revision_id,
                row.number,
                row.version,
            )
    return found


def _already_there(
    connection: sa.Connection, policy_ids: list[int], exports: Sequence[Prepared]
) -> dict[tuple[int, int, bytes], Any]:
    found = {}
    digests = sorted({export.digest for export in exports})
    for some in chunks(sorted(set(policy_ids))):
        for chunk in chunks(digests):
            query = sa.select(revisions).where(
                revisions.c.digest.in_(chunk),
                revisions.c.policy_id.in_(some),
                revisions.c.state == "live",
            )
            for row in connection.execute(query.order_by(revisions.c.id)):
                found[row.policy_id, row.step, row.digest] = SimpleNamespace(**row._mapping)
    return found


def _advance_latest(connection: sa.Connection, author: Author, made: list[tuple[Any, Any]]) -> None:
    """``latest`` follows the exports, one audit entry each."""
    entries, touched = [], {}
    for policy, revision in made:
        if policy.latest_id == revision.id:  # exported again
            continue
        fields = {
            "alias": LATEST,
            "before": policy.latest_number,
            "after": revision.number,
            "version": policy.latest_version + 1,
            "under": policy.latest_version,
        }
        entries.append(
            audit.row(
                author,
                "export",
                policy,
                {"digest": revision.digest.hex(), "step": revision.step},
                **fields,
            )
        )
        policy.latest_id, policy.latest_number, policy.latest_version = (
            revision.id,
            revision.number,
            policy.latest_version + 1,
        )
        policy.latest_digest = revision.digest
        touched[policy.id] = policy
    if not touched:
        return
    at = {number: max(author.now, policy.touched_at) for number, policy in touched.items()}
    _upsert_latest(connection, touched, at)
    update = policy_table.update().where(policy_table.c.id == sa.bindparam("policy"))
    update = update.values(last_number=sa.bindparam("number"), touched_at=sa.bindparam("at"))
    connection.execute(
        update,
        [
            {"policy": number, "number": p.last_number, "at": at[number]}
            for number, p in touched.items()
        ],
    )
    audit.append(connection, *entries)


def _upsert_latest(
    connection: sa.Connection, touched: dict[int, Any], at: dict[int, float]
) -> None:
    insert = dialect_insert(connection, aliases)
    insert = insert.on_conflict_do_update(
        index_elements=["policy_id", "name"],
        set_={
            name: insert.excluded[name]
            for name in ("revision_id", "version", "updated_at", "checksum")
        },
    )
    rows = [
        {
            "policy_id": number,
            "name": LATEST,
            "revision_id": p.latest_id,
            "version": p.latest_version,
            "updated_at": at[number],
            "checksum": alias_checksum(
                number, LATEST, p.latest_version, p.latest_number, p.latest_digest
            ),
        }
        for number, p in touched.items()
    ]
    connection.execute(insert, rows)


@functools.lru_cache(1024)
def read_schema(text: str) -> Schema:
    """A schema from its text."""
    return Schema.from_json(text)


@functools.lru_cache(1024)
def _canonical(text: str) -> tuple[str, str]:
    schema = read_schema(text)
    return schema.to_json(), schema.dtype


def schema_text(data: Buffer) -> str:
    """The schema of a packed object, which is checked as ``unpack`` does but without a look at the
    factors.

    Raises:
        UserError: not a packed adapter.
    """
    try:
        metadata, tensors, _ = header.read(as_bytes(data))
        text, dtype = _canonical(metadata["schema"])
    except (UserError, KeyError):
        return unpack(data)[1].to_json()  # raises, with the reason
    if any(tensor.dtype != header.DTYPES[header.TAGS[dtype]] for tensor in tensors.values()):
        return unpack(data)[1].to_json()
    return text


def check_schema(export: Prepared, policy_schema: str) -> None:
    """The bytes must be of the policy's base and adapter config; the dtype may differ.

    Raises:
        UserError: they are not.
    """
    mine, theirs = read_schema(export.schema), read_schema(policy_schema)
    mine = dataclasses.replace(mine, dtype=theirs.dtype)
    if mine != theirs:
        for what, found, expected in (
            ("base", mine.base, theirs.base),
            *(
                (f.name, getattr(mine.config, f.name), getattr(theirs.config, f.name))
                for f in dataclasses.fields(mine.config)
            ),
        ):
            if found != expected:
                named = full_name(export.tenant, export.name)
                raise UserError(
                    f"policy {named!r} has {what} {expected!r}, the exported adapter has {found!r}:"
                    " export it as another policy"
                )
