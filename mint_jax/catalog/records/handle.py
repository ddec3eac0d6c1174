"""An open catalog, as all operations take it: database, payload store, default author and clock.

And a policy's row, found, locked or changed: the start and the end of most operations.
"""

import getpass
import os
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, Unpack

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


class Change(NamedTuple):
    """A transaction of an author that changes one policy, whose row is locked."""

    connection: sa.Connection
    author: Author
    policy: Any

    @property
    def full(self) -> str:
        """Full name of the policy."""
        return full_name(self.policy.tenant, self.policy.name)

    @property
    def now(self) -> float:
        """Time of the change; times of one policy do not go back."""
        return max(self.author.now, self.policy.touched_at)

    def touch(self, **columns: Any) -> None:
        """Changes columns of the policy, and sets the time of its last change."""
        update = policies.update().where(policies.c.id == self.policy.id)
        self.connection.execute(update.values(touched_at=self.now, **columns))

    def record(
        self, action: str, details: Any = None, before: int | None = None, **columns: Any
    ) -> None:
        """``touch`` with an entry in the audit log."""
        self.touch(**columns)
        audit.log(self.connection, self.author, action, self.policy, details, before=before)


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
        body: Callable[[Change], T],
        active: bool = False,
        **signed: Unpack[Signed],
    ) -> T:
        """Runs ``body`` in one transaction. ``active``: refuse a retired policy."""
        key, author = names.parse_policy(policy), self.author(**signed)
        return self.database.write(lambda c: body(Change(c, author, lock(c, *key, active=active))))


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
        full = full_name(policy.tenant, policy.name)
        raise UserError(f"policy {full!r} is retired: restore it first")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
