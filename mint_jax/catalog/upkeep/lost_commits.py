"""Commits that a database has lost: recorded in the audit log when it is next opened, and reported until a user accepts the loss."""

import sqlalchemy as sa

from mint_jax.catalog.records import audit
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import Database
from mint_jax.catalog.records.tables import audit as log

_LOST, _ACCEPTED = "lost commits", "accept losses"


def record(database: Database, author: Author) -> None:
    """Enters what the witness knows and the database does not."""
    if (gone := database.lost()) is None:
        return
    last, seen = gone
    database.write(lambda c: audit.append(c, audit.row(author, _LOST, details={"last": last, "seen": seen})))
    database.forget_lost()


def accept(connection: sa.Connection, author: Author) -> None:
    """What was lost so far is not reported any more."""
    audit.append(connection, audit.row(author, _ACCEPTED))


def report(connection: sa.Connection) -> list[str]:
    """What is lost and not accepted, in words."""
    lost: list[str] = []
    query = sa.select(log).where(log.c.action.in_([_LOST, _ACCEPTED]), log.c.policy_id.is_(None)).order_by(log.c.id)
    for row in connection.execute(query):
        if row.action == _ACCEPTED:
            lost = []
        else:
            found = audit.details(row)
            lost.append(
                f"entries {found['last'] + 1} to {found['seen']} of the audit log were committed and are gone: the database's log was "
                "damaged, or an older copy was put in its place; restore a backup, or make again what is missing, then "
                "gc --accept-losses"
            )
    return lost
