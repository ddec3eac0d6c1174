"""Operations: client calls that outlive their connection. A key makes a retry the same operation; its id can be polled.

This table is its own log: it records who asked for what and when, and how it ended.
"""

import json
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.audit import Author
from mint_jax.catalog.database import insert_new
from mint_jax.catalog.names import clean, note
from mint_jax.catalog.records import Operation
from mint_jax.catalog.tables import operations
from mint_jax.errors import UserError


def begin(
    connection: sa.Connection, author: Author, tenant: str, kind: str, key: str, request: Any, fresh_id: str
) -> tuple[Operation, bool]:
    """The operation of that key, and whether it is new; it then has id ``fresh_id``.

    Raises:
        UserError: the key was used for another request.
    """
    text = _json("request", request)
    key = note("operation key", key, 400)
    row = {
        "id": fresh_id,
        "tenant": clean("tenant", tenant),
        "kind": note("operation kind", kind, 400),
        "key": key,
        "state": "running",
        "request": text,
        "result": None,
        "error": None,
        "created_at": author.now,
        "finished_at": None,
    }
    insert_new(connection, operations, [row])
    found = connection.execute(sa.select(operations).where(operations.c.tenant == row["tenant"], operations.c.key == key)).one()
    if (found.kind, found.request) != (kind, text):
        raise UserError(f"operation key {key[:80]!r} was used for another request of kind {found.kind!r}: choose a fresh key")
    return _operation(found), found.id == row["id"]


def finish(connection: sa.Connection, author: Author, id: str, result: Any, error: str | None) -> Operation:
    """Writes how an operation ended; the same end may be written again.

    Raises:
        UserError: no such operation, or it ended otherwise.
    """
    state = "done" if error is None else "failed"
    text = _json("result", result) if error is None else None
    if error is not None:
        note("error", error, 100_000)
    found = connection.execute(sa.select(operations).where(operations.c.id == id).with_for_update()).first()
    if found is None:
        raise UserError(f"operation {id[:80]!r} does not exist: begin it first")
    if found.state == "running":
        values = {"state": state, "result": text, "error": error, "finished_at": max(author.now, found.created_at)}
        connection.execute(operations.update().where(operations.c.id == id).values(**values))
    elif (found.state, found.result, found.error) != (state, text, error):
        raise UserError(f"operation {id!r} has ended already as {found.state}: its end cannot be changed")
    return get(connection, id)


def get(connection: sa.Connection, id: str) -> Operation:
    """An operation by its id."""
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
