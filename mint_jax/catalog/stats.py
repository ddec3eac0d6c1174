"""Counts and bytes of a catalog."""

import sqlalchemy as sa

from mint_jax.catalog.tables import metadata, packs, payloads, policies, revisions


def count(connection: sa.Connection) -> dict[str, int]:
    """Rows of every table, and what the tables show only by a query."""
    rows = {name: sa.select(sa.func.count()).select_from(table) for name, table in sorted(metadata.tables.items())}
    more = {
        "retired_policies": sa.select(sa.func.count()).where(policies.c.state == "retired"),
        "retired_revisions": sa.select(sa.func.count()).where(revisions.c.state == "retired"),
        "open_sessions": sa.select(sa.func.count()).where(policies.c.session_owner.is_not(None)),
        "payload_bytes": sa.select(sa.func.sum(payloads.c.length)),
        "pack_bytes": sa.select(sa.func.sum(packs.c.bytes)).where(packs.c.state != "swept"),
        "dead_packs": sa.select(sa.func.count()).where(packs.c.state == "dead"),
    }
    return {name: int(connection.scalar(query) or 0) for name, query in (rows | more).items()}
