"""Whether a payload's numbers were looked at when it came in, and what was found."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("payloads", sa.Column("finite", sa.Boolean))
