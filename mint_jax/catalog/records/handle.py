"""An open catalog, as all operations take it: database, payload store, default author and clock.

And a policy's row, found, locked or changed: the start and the end of most operations.
"""

import getpass
import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import Author, Signed
from mint_jax.catalog.records.database import Database
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.tables import policies, schemas
from mint_jax.catalog.storage.payloads import PayloadStore
from mint_jax.errors import UserError

T = TypeVar("T")
POLICIES = sa.select(policies, schemas.c.json).join(schemas)  # with the schema's text as ``json``


class Handle:
    """An open catalog.

    Args:
        actor: author of the changes where an operation's ``by`` is None.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        database: Database,
        store: PayloadStore,
        actor: str | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self.database, self.store, self.clock = database, store, clock
        self.actor = f"{_user()}@{socket.gethostname()}" if actor is None else actor

    def author(self, by: str | None = None, why: str = "") -> Author:
        """The author of a change now."""
        return Author(self.actor if by is None else by, why, self.clock())

    def look(self, policy: str, body: Callable[[Any, Any], T]) -> T:
        """Runs ``body(connection, policy's row)``, which only reads."""
        key = names.parse_policy(policy)
        return self.database.read(lambda c: body(c, find(c, *key)))

    def change(
        self,
        policy: str,
        body: Callable[[Any, Author, Any], T],
        active: bool = False,
        **signed: Unpack[Signed],
    ) -> T:
        """Runs ``body(connection, author, policy's locked row)`` in one transaction. ``active``:
        refuse a retired policy.
        """
        key, author = names.parse_policy(policy), self.author(**signed)
        return self.database.write(lambda c: body(c, author, lock(c, *key, active=active)))


def find(connection: sa.Connection, tenant: str, name: str, query: sa.Select = POLICIES) -> sa.Row:
    """Returns a policy's row of ``POLICIES``. Raises ``UserError`` if it does not exist."""
    found = connection.execute(
        query.where(policies.c.tenant == tenant, policies.c.name == name)
    ).first()
    if found is None:
        raise UserError(
            f"policy {full_name(tenant, name)!r} is not in the catalog: list the policies, or"
            " create it"
        )
    return found


def lock(connection: sa.Connection, tenant: str, name: str, active: bool = False) -> sa.Row:
    """Like ``find``, and keeps other transactions from changing the policy until this one ends.
    Raises ``UserError``: the policy does not exist, or is retired and must be ``active``.
    """
    found = find(connection, tenant, name, POLICIES.with_for_update(of=policies))
    if active:
        check_active(found)
    return found


def check_active(policy: Any) -> None:
    """Raises ``UserError`` for a retired policy."""
    if policy.state != "active":
        raise UserError(
            f"policy {full_name(policy.tenant, policy.name)!r} is retired: restore it first"
        )


def touch(connection: sa.Connection, author: Author, policy: Any, **changes: Any) -> None:
    """Changes columns of a locked policy and sets the time of its last change."""
    changes["touched_at"] = max(author.now, policy.touched_at)
    connection.execute(policies.update().where(policies.c.id == policy.id).values(**changes))


def record(
    connection: sa.Connection,
    author: Author,
    policy: Any,
    action: str,
    details: dict[str, Any] | None = None,
    before: int | None = None,
    **changes: Any,
) -> None:
    """``touch`` with an entry in the audit log."""
    touch(connection, author, policy, **changes)
    audit.log(connection, author, action, policy, details, before=before)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
