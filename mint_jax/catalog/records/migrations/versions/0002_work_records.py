"""What happens around revisions: checkpoints, rollouts, evaluations, operations, leases."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Name = sa.String().with_variant(postgresql.VARCHAR(collation="C"), "postgresql")
Digest = sa.LargeBinary(32)
Time = sa.Double()


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column("policy_id", Id, sa.ForeignKey("policies.id"), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("place", sa.String, nullable=False),
        sa.Column("created_at", Time, nullable=False),
    )
    op.create_index("checkpoints_policy", "checkpoints", ["policy_id", "id"])
    op.create_table(
        "rollouts",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column("policy_id", Id, sa.ForeignKey("policies.id"), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("digest", Digest, sa.ForeignKey("payloads.digest"), nullable=False, index=True),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("mean_reward", Time, nullable=False),
        sa.Column("created_at", Time, nullable=False),
    )
    op.create_index("rollouts_policy", "rollouts", ["policy_id", "id"])
    op.create_table(
        "evaluations",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column(
            "revision_id", Id, sa.ForeignKey("revisions.id", ondelete="SET NULL"), index=True
        ),
        sa.Column("digest", Digest, nullable=False, index=True),
        sa.Column("base", sa.String, nullable=False),
        sa.Column("renderer", sa.String, nullable=False),
        sa.Column("scorer", sa.String, nullable=False),
        sa.Column("dataset", sa.String, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("isolated", Time, nullable=False),
        sa.Column("shared", Time, nullable=False),
        sa.Column("created_at", Time, nullable=False),
    )
    op.create_table(
        "operations",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("tenant", Name, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("key", Name, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("result", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("created_at", Time, nullable=False),
        sa.Column("finished_at", Time, index=True),
        sa.UniqueConstraint("tenant", "key"),
    )
    op.create_table(
        "leases",
        sa.Column("id", Id, primary_key=True, autoincrement=True),
        sa.Column("digest", Digest, sa.ForeignKey("payloads.digest"), nullable=False, index=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("expires_at", Time, nullable=False, index=True),
    )
