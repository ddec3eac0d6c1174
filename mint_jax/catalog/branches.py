"""Branches: a new policy that begins at a revision of another one. The bytes are shared, the histories are not."""

import sqlalchemy as sa

from mint_jax.catalog import audit, policies
from mint_jax.catalog.audit import Author
from mint_jax.catalog.exports import read_schema
from mint_jax.catalog.names import LATEST
from mint_jax.catalog.records import full_name
from mint_jax.catalog.tables import aliases, revisions
from mint_jax.catalog.tables import policies as policy_table


def branch(connection: sa.Connection, author: Author, source: sa.Row, begin: sa.Row, tenant: str, name: str, keep_last: int | None) -> None:
    """Makes policy ``tenant/name`` whose first revision has the bytes of ``begin``, a live revision of the locked ``source``."""
    made = policies.create(connection, author, tenant, name, read_schema(source.json), keep_last)
    origin = f"branch of {full_name(source.tenant, source.name)}@{begin.number}"
    at = max(author.now, made.touched_at)
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
    }
    first = connection.scalar(revisions.insert().returning(revisions.c.id), values)
    connection.execute(aliases.insert(), {"policy_id": made.id, "name": LATEST, "revision_id": first, "version": 1, "updated_at": at})
    connection.execute(policy_table.update().where(policy_table.c.id == made.id).values(parent_revision=begin.id, last_number=1))
    fields = {"alias": LATEST, "after": 1, "version": 1, "under": 0}
    audit.append(connection, audit.row(author, "branch", made, {"digest": begin.digest.hex(), "origin": origin}, **fields))
