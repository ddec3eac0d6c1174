"""Policies, revisions and their payloads, aliases, audit log.

A migration is history: it spells its tables out and does not follow later changes of ``tables.py``.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Name = sa.String().with_variant(postgresql.VARCHAR(collation="C"), "postgresql")
Digest = sa.LargeBinary(32)
Time = sa.Double()


def upgrade() -> None:
    op.create_table(
        "schemas",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column("digest", Digest, nullable=False, unique=True),
        sa.Column("json", sa.Text, nullable=False),
    )
    postgres = op.get_bind().dialect.name == "postgresql"
    # policies and revisions name each other
    parent = sa.ForeignKey("revisions.id", name="policies_parent", use_alter=postgres)
    op.create_table(
        "policies",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column("tenant", Name, nullable=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("base", sa.String, nullable=False),
        sa.Column("schema_id", Id, sa.ForeignKey("schemas.id"), nullable=False),
        sa.Column("parent_revision", Id, *([] if postgres else [parent])),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("keep_last", sa.Integer),
        sa.Column("created_at", Time, nullable=False),
        sa.Column("touched_at", Time, nullable=False),
        sa.Column("last_number", sa.Integer, nullable=False),
        sa.Column("session_number", sa.Integer, nullable=False),
        sa.Column("session_owner", sa.String),
        sa.Column("session_expires", Time),
        sa.Column("session_seconds", Time),
        sa.Column("session_revision", sa.Integer),
        sa.UniqueConstraint("tenant", "name"),
    )
    op.create_index("ix_policies_parent_revision", "policies", ["parent_revision"])
    op.create_table(
        "packs",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column("name", Name, nullable=False, unique=True),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("changed_at", Time, nullable=False),
    )
    op.create_table(
        "payloads",
        sa.Column("digest", Digest, primary_key=True),
        sa.Column("schema_id", Id, sa.ForeignKey("schemas.id")),
        sa.Column("pack_id", Id, sa.ForeignKey("packs.id"), nullable=False, index=True),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("length", sa.BigInteger, nullable=False),
        sa.Column("created_at", Time, nullable=False),
    )
    op.create_table(
        "revisions",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column("policy_id", Id, sa.ForeignKey("policies.id"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("digest", Digest, sa.ForeignKey("payloads.digest"), nullable=False),
        sa.Column("origin", sa.String, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("created_at", Time, nullable=False),
        sa.UniqueConstraint("policy_id", "number"),
    )
    op.create_index("revisions_digest", "revisions", ["digest", "policy_id"])
    if postgres:
        op.create_foreign_key(
            "policies_parent", "policies", "revisions", ["parent_revision"], ["id"]
        )
    op.create_table(
        "aliases",
        sa.Column(
            "policy_id", Id, sa.ForeignKey("policies.id"), primary_key=True, autoincrement=False
        ),
        sa.Column("name", Name, primary_key=True),
        sa.Column("revision_id", Id, sa.ForeignKey("revisions.id"), nullable=False, index=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("updated_at", Time, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column("at", Time, nullable=False),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("why", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("policy_id", Id, sa.ForeignKey("policies.id")),
        sa.Column("alias", Name),
        sa.Column("before", sa.Integer),
        sa.Column("after", sa.Integer),
        sa.Column("version", sa.Integer),
        sa.Column("under", sa.Integer),
        sa.Column("details", sa.Text, nullable=False),
        sa.Column("write", sa.LargeBinary(16), nullable=False),
        sa.UniqueConstraint("policy_id", "alias", "version"),
    )
    op.create_index("audit_policy", "audit", ["policy_id", "id"])
