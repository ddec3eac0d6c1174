"""Checksums of the rows that a name leads through."""

import sqlalchemy as sa
from alembic import op

from mint_jax.catalog.records.tables import alias_checksum, policy_checksum, revision_checksum

revision = "0006"
down_revision = "0005"
ROWS = 10_000  # of one statement


def upgrade() -> None:
    for table in ("policies", "revisions", "aliases"):
        op.add_column(table, sa.Column("checksum", sa.BigInteger))
    _fill(
        "SELECT id, tenant, name FROM policies",
        "UPDATE policies SET checksum = :checksum WHERE id = :id",
        _policy,
    )
    made = (
        "SELECT r.id, r.policy_id, r.number, r.digest, s.digest AS schema_digest FROM revisions r"
    )
    made += " JOIN payloads p ON p.digest = r.digest JOIN schemas s ON s.id = p.schema_id"
    _fill(made, "UPDATE revisions SET checksum = :checksum WHERE id = :id", _revision)
    moved = (
        "SELECT a.policy_id, a.name, a.version, r.number, r.digest FROM aliases a JOIN revisions r"
        " ON r.id = a.revision_id"
    )
    _fill(
        moved,
        "UPDATE aliases SET checksum = :checksum WHERE policy_id = :policy_id AND name = :name",
        _alias,
    )


def _fill(query: str, update: str, values) -> None:
    connection = op.get_bind()
    rows = [values(row) for row in connection.execute(sa.text(query))]
    for start in range(0, len(rows), ROWS):
        connection.execute(sa.text(update), rows[start : start + ROWS])


def _policy(row: sa.Row) -> dict:
    return {"id": row.id, "checksum": policy_checksum(row.id, row.tenant, row.name)}


def _revision(row: sa.Row) -> dict:
    return {
        "id": row.id,
        "checksum": revision_checksum(row.policy_id, row.number, row.digest, row.schema_digest),
    }


def _alias(row: sa.Row) -> dict:
    checksum = alias_checksum(row.policy_id, row.name, row.version, row.number, row.digest)
    return {"policy_id": row.policy_id, "name": row.name, "checksum": checksum}
