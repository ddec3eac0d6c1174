"""Tags of policies and revisions."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    name = sa.String().with_variant(sa.VARCHAR(collation="C"), "postgresql")
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "tags",
        sa.Column(
            "policy_id", number, sa.ForeignKey("policies.id"), primary_key=True, autoincrement=False
        ),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key", name, primary_key=True),
        sa.Column("value", name, nullable=False),
    )
    op.create_index("tags_key", "tags", ["key", "value"])
