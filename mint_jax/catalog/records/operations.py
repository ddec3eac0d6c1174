"""Operations: client calls that outlive their connection. A key makes a retry the same operation; its id can be polled.

This table is its own log: it records who asked for what and when, and how it ended.
"""

import dataclasses
import json
import uuid
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.records.database import insert_new
from mint_jax.catalog.records.names import DEFAULT_TENANT, clean, note
from mint_jax.catalog.records.policies import Policies
from mint_jax.catalog.records.tables import operations
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Operation:
    """One client call. ``state``: ``running``, ``done`` (with ``result``) or ``failed`` (with ``error``)."""

    id: str
    tenant: str
    kind: str
    key: str
    state: str
    request: Any
    result: Any
    error: str | None
    created_at: float
    finished_at: float | None


class Operations(Policies):
    """Begins operations once, and keeps how they ended."""

    def begin_operation(self, kind: str, key: str, request: Any = None, tenant: str = DEFAULT_TENANT) -> tuple[Operation, bool]:
        """The operation of a key, and whether this call began it; a retry finds the first one, with its result if it has one.

        Raises:
            UserError: the key was used for another request.
        """
        row = {
            "id": uuid.uuid4().hex,
            "tenant": clean("tenant", tenant),
            "kind": note("operation kind", kind, 400),
            "key": note("operation key", key, 400),
            "state": "running",
            "request": _json("request", request),
            "result": None,
            "error": None,
            "created_at": self._clock(),
            "finished_at": None,
        }

        def body(connection: sa.Connection) -> tuple[Operation, bool]:
            insert_new(connection, operations, [row])
            found = connection.execute(sa.select(operations).where(operations.c.tenant == row["tenant"], operations.c.key == key)).one()
            if (found.kind, found.request) != (kind, row["request"]):
                raise UserError(f"operation key {key[:80]!r} was used for another request of kind {found.kind!r}: choose a fresh key")
            return _operation(found), found.id == row["id"]

        return self.database.write(body)

    def finish_operation(self, id: str, result: Any = None, error: str | None = None) -> Operation:
        """Writes how an operation ended. Saying the same again is fine.

        Raises:
            UserError: no such operation, or it ended otherwise.
        """
        state, now = "done" if error is None else "failed", self._clock()
        text = _json("result", result) if error is None else None
        if error is not None:
            note("error", error, 100_000)

        def body(connection: sa.Connection) -> Operation:
            found = connection.execute(sa.select(operations).where(operations.c.id == id).with_for_update()).first()
            if found is None:
                raise UserError(f"operation {id[:80]!r} does not exist: begin it first")
            if found.state == "running":
                values = {"state": state, "result": text, "error": error, "finished_at": max(now, found.created_at)}
                connection.execute(operations.update().where(operations.c.id == id).values(**values))
            elif (found.state, found.result, found.error) != (state, text, error):
                raise UserError(f"operation {id!r} has ended already as {found.state}: its end cannot be changed")
            return _get(connection, id)

        return self.database.write(body)

    def operation(self, id: str) -> Operation:
        """An operation by its id."""
        return self.database.read(lambda c: _get(c, id))


def _get(connection: sa.Connection, id: str) -> Operation:
    found = connection.execute(sa.select(operations).where(operations.c.id == id)).first()
    if found is None:
        raise UserError(f"operation {id[:80]!r} does not exist or was removed after it ended")
    return _operation(found)


def remove_ended(connection: sa.Connection, before: float) -> int:
    """Forgets operations that ended before a time."""
    return connection.execute(operations.delete().where(operations.c.finished_at < before)).rowcount


def _json(what: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} of an operation is not JSON ({error}): give plain values") from None


def _operation(row: sa.Row) -> Operation:
    result = None if row.result is None else json.loads(row.result)
    return Operation(
        row.id, row.tenant, row.kind, row.key, row.state, json.loads(row.request), result, row.error, row.created_at, row.finished_at
    )
