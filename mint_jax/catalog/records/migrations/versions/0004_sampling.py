"""How a revision's policy drew its rollouts in training."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("revisions", sa.Column("sampling", sa.Text))
