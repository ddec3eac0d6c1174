"""Sessions, models, samplers and checkpoints of one server, as rows of its database.

The payloads are elsewhere: training states in ``training/``, adapters in the catalog, checkpoints
in files. Another tenant's row is invisible; only a published checkpoint is visible to all. Calls
that create a row may be repeated and then find it. Lists are in the order of creation (SQLite's
``rowid``), whatever the clock was.
"""

import dataclasses
import datetime
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mint_jax.errors import UserError
from mint_jax.service.server_db import Connection, ServerDatabase

INFLIGHT = "inflight:"
_KEY = "model = ? AND kind = ? AND name = ?"
_LIVE = "(expires IS NULL OR expires > ?)"
_IN_PROJECT = """tenant = ? AND (? IS NULL OR session IN (
    SELECT id FROM sessions WHERE json_extract(details, '$.project_id') = ?))"""
_UNNAMED = (
    "NOT EXISTS (SELECT 1 FROM checkpoints WHERE digest = {0})"
    " AND NOT EXISTS (SELECT 1 FROM samplers WHERE digest = {0})"
)


class NotFound(UserError):
    """It does not exist, or it is another tenant's."""


@dataclasses.dataclass(frozen=True)
class _Row:
    id: str
    tenant: str
    created: float


@dataclasses.dataclass(frozen=True)
class Session(_Row):
    """A client's session; ``details`` has the client's tags, metadata and display name."""

    details: dict[str, Any]
    ended: float | None


@dataclasses.dataclass(frozen=True)
class Model(_Row):
    """A policy that is or was in training; ``details`` has rank, bytes, optimizer and the user's
    metadata.
    """

    session: str
    details: dict[str, Any]
    ended: float | None

    @property
    def optimizer(self) -> str:
        return self.details.get("optimizer", "adamw")


@dataclasses.dataclass(frozen=True)
class Sampler(_Row):
    """A sampler of the bare base, or of the weights of one digest. With the path ``inflight:MODEL``
    it moves to the digest that the model's newest sampler of that path began with.
    """

    session: str
    path: str | None
    digest: str | None

    @property
    def is_inflight(self) -> bool:
        return self.path is not None and self.path.startswith(INFLIGHT)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's weights under a name, made by a ``request``. ``details`` has config, base,
    optimizer and the user's metadata; ``expires`` is in seconds since 1970, None for never.
    """

    model: str
    kind: str
    name: str
    tenant: str
    digest: str
    nbytes: int
    request: str
    details: dict[str, Any]
    created: float
    expires: float | None
    public: bool

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"

    @property
    def optimizer(self) -> str:
        return self.details.get("optimizer", "adamw")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.kind, self.name

    @property
    def policy(self) -> str:
        """The catalog's policy that has a sampler checkpoint; of a copy, that of its source."""
        return self.details.get("policy") or f"{self.tenant}/{self.model}"


class Book:
    """All rows; may be called from any thread. A change is on the disk when its call returns; every
    change raises ``DatabaseFailed`` if the disk refuses. A row that does not exist raises
    ``NotFound``. Lists have the newest row first. ``clock`` returns seconds since 1970.
    """

    def __init__(self, database: ServerDatabase, clock: Callable[[], float] | None = None):
        self.database, self.clock = database, clock or steady()
        self._owners: dict[str, str] = {}

    # sessions

    def open_session(self, tenant: str, details: Mapping[str, Any], id: str | None = None) -> str:
        """Returns the id of a new session; ``id`` names one, which is created unless it exists."""
        id = id or self.database.new_id()
        new = id, tenant, json.dumps(dict(details)), self.clock(), None
        self._insert("IGNORE", "sessions", *new)
        return id

    def session(self, tenant: str, id: str) -> Session:
        return self._one(Session, "session", tenant, id)

    def sessions(self, tenant: str, limit: int | None = None, offset: int = 0) -> list[Session]:
        return self._page(Session, "tenant = ?", (tenant,), limit, offset)

    def update_session(self, session: Session, **details: Any) -> None:
        query = "UPDATE sessions SET details = json_patch(details, ?) WHERE id = ?"
        self._write(query, json.dumps(details), session.id)

    def end_session(self, id: str) -> list[str]:
        """Ends a session; returns its models that had not ended."""
        now = self.clock()

        def apply(connection: Connection) -> list[str]:
            query = "UPDATE sessions SET ended = ? WHERE id = ? AND ended IS NULL"
            connection.execute(query, (now, id))
            query = "UPDATE models SET ended = ? WHERE session = ? AND ended IS NULL RETURNING id"
            return [row["id"] for row in connection.execute(query, (now, id)).fetchall()]

        return self.database.write(apply).result()

    def open_sessions(self) -> dict[str, str]:
        """Returns the tenants of sessions that have not ended, by id."""
        rows = self.database.read("SELECT id, tenant FROM sessions WHERE ended IS NULL")
        return dict(map(tuple, rows))

    def count_start(self) -> int:
        """Counts a start of the server; returns its number, from 1."""
        return self._write("INSERT INTO starts DEFAULT VALUES RETURNING number")[0]["number"]

    # models

    def add_model(
        self, session: str, number: int, tenant: str, details: Mapping[str, Any]
    ) -> Model:
        """Returns a session's model of this number, created unless it exists."""
        id = f"{session}:train:{number}"
        new = id, session, tenant, json.dumps(dict(details)), self.clock(), None
        self._insert("IGNORE", "models", *new)
        return self.model(tenant, id)

    def model(self, tenant: str, id: str) -> Model:
        return self._one(Model, "model", tenant, id)

    def owner(self, model: str) -> str:
        if (tenant := self._owners.get(model)) is None:
            rows = self.database.read("SELECT tenant FROM models WHERE id = ?", model)
            if not rows:
                raise NotFound(f"there is no model {model[:200]!r}")
            tenant = self._owners[model] = rows[0]["tenant"]
        return tenant

    def end_model(self, id: str) -> None:
        self._write("UPDATE models SET ended = ? WHERE id = ? AND ended IS NULL", self.clock(), id)

    def has_ended(self, model: str) -> bool:
        """Returns whether a model has ended; True if it does not exist."""
        return not self.database.read("SELECT 1 FROM models WHERE id = ? AND ended IS NULL", model)

    def living(self, tenant: str) -> list[Model]:
        return self._page(Model, "tenant = ? AND ended IS NULL", (tenant,))

    def models(
        self, tenant: str, limit: int, offset: int, project: str | None = None
    ) -> list[Model]:
        return self._page(Model, _IN_PROJECT, (tenant, project, project), limit, offset)

    def models_of(self, tenant: str, session: str) -> list[str]:
        return self._ids("models", tenant, session)

    def count_models(self, tenant: str, project: str | None = None) -> int:
        query = f"SELECT COUNT(*) FROM models WHERE {_IN_PROJECT}"
        return self.database.read(query, tenant, project, project)[0][0]

    # samplers

    def add_sampler(
        self, session: str, number: int, tenant: str, path: str | None, digest: str | None
    ) -> Sampler:
        """Returns a session's sampler of this number, created unless it exists."""
        id = f"{session}:sample:{number}"
        new = id, session, tenant, path, digest, self.clock()
        self._insert("IGNORE", "samplers", *new)
        return self.sampler(tenant, id)

    def sampler(self, tenant: str, id: str) -> Sampler:
        return self._one(Sampler, "sampling session", tenant, id)

    def digest_of(self, sampler: Sampler) -> str | None:
        """Returns the digest that a sampler draws from now; None for the bare base."""
        if not sampler.is_inflight:
            return sampler.digest
        query = "SELECT digest FROM samplers WHERE session = ? AND path = ? ORDER BY rowid DESC"
        return self.database.read(f"{query} LIMIT 1", sampler.session, sampler.path)[0]["digest"]

    def samplers_of(self, tenant: str, session: str) -> list[str]:
        return self._ids("samplers", tenant, session)

    # checkpoints

    def need_free(self, model: str, kind: str, name: str, request: str) -> None:
        """Raises ``UserError`` if another request saved a checkpoint of this name."""
        query = f"SELECT 1 FROM checkpoints WHERE {_KEY} AND request != ?"
        if self.database.read(query, model, kind, name, request):
            raise UserError(
                f"tinker://{model}/{kind}/{name} exists already: choose another name, or save with"
                " overwrite"
            )

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Adds a row, or replaces the one of its name, which ``need_free`` checks."""
        row = dataclasses.asdict(checkpoint) | {"details": json.dumps(checkpoint.details)}
        self._insert("REPLACE", "checkpoints", *row.values())

    def checkpoint(
        self, tenant: str, model: str, kind: str, name: str, published: bool = False
    ) -> Checkpoint:
        """Returns a tenant's checkpoint, or if ``published`` a public one."""
        where = f"{_KEY} AND {_LIVE} AND (tenant = ? OR (? AND public))"
        values = model, kind, name, self.clock(), tenant, published
        query = f"SELECT * FROM checkpoints WHERE {where}"
        # another engine of a fleet may have saved it
        if not (rows := self.database.read_of(model, query, *values)):
            raise _no_checkpoint(f"tinker://{model}/{kind}/{name}")
        return _record(Checkpoint, rows[0])

    def checkpoints(
        self, tenant: str, model: str | None = None, limit: int | None = None, offset: int = 0
    ) -> list[Checkpoint]:
        where = f"tenant = ? AND {_LIVE} AND (? IS NULL OR model = ?)"
        return self._page(Checkpoint, where, (tenant, self.clock(), model, model), limit, offset)

    def stored(self, tenant: str, project: str | None = None) -> list[tuple[str | None, int, int]]:
        """Returns projects of checkpoints, their number and bytes, each content once."""
        query = """SELECT project, COUNT(*), (SELECT SUM(nbytes) FROM (
                SELECT DISTINCT digest, nbytes FROM found AS f WHERE f.project IS found.project))
            FROM found WHERE ?2 IS NULL OR project = ?2 GROUP BY project"""
        found = """SELECT digest, nbytes, json_extract(sessions.details, '$.project_id') AS project
            FROM checkpoints JOIN models ON model = models.id JOIN sessions ON session = sessions.id
            WHERE checkpoints.tenant = ?1 AND (expires IS NULL OR expires > ?3)"""
        rows = self.database.read(f"WITH found AS ({found}) {query}", tenant, project, self.clock())
        return [tuple(row) for row in rows]

    def checkpoint_totals(self, tenant: str, session: str | None = None) -> tuple[int, int]:
        """Returns the number and the bytes, each content once, of checkpoints."""
        models = "SELECT id FROM models WHERE session = ?2"
        where = "tenant = ?1 AND (expires IS NULL OR expires > ?3)"
        found = f"FROM checkpoints WHERE {where} AND (?2 IS NULL OR model IN ({models}))"
        query = f"""SELECT (SELECT COUNT(*) {found}), COALESCE(SUM(nbytes), 0)
            FROM (SELECT DISTINCT digest, nbytes {found})"""
        return tuple(self.database.read(query, tenant, session, self.clock())[0])

    def change_checkpoint(self, checkpoint: Checkpoint, **values: Any) -> None:
        """Sets ``expires`` or ``public`` of a checkpoint."""
        sets = ", ".join(f"{name} = ?" for name in values)
        query = f"UPDATE checkpoints SET {sets} WHERE {_KEY} AND tenant = ? AND {_LIVE} RETURNING 1"
        where = *checkpoint.key, checkpoint.tenant, self.clock()
        if not self._write(query, *values.values(), *where):
            raise _no_checkpoint(checkpoint.path)

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Removes what was saved last under a checkpoint's path."""
        query = f"DELETE FROM checkpoints WHERE {_KEY} AND tenant = ? RETURNING 1"
        if not self._write(query, *checkpoint.key, checkpoint.tenant):
            raise _no_checkpoint(checkpoint.path)

    def remove_expired(self, snapshots_s: float) -> int:
        """Removes checkpoints whose time to live is over, and samplers of unnamed weights
        ``snapshots_s`` after their session; returns how many.
        """
        now = self.clock()
        checkpoints = self._write("DELETE FROM checkpoints WHERE expires <= ? RETURNING 1", now)
        query = """DELETE FROM samplers WHERE id IN (
            SELECT samplers.id FROM samplers JOIN sessions ON session = sessions.id
            WHERE ended < ? AND (path IS NULL OR path GLOB 'inflight:*') AND digest IS NOT NULL
            LIMIT 256) RETURNING 1"""
        return len(checkpoints) + len(self._write(query, now - snapshots_s))

    def unused(self, digest: str) -> bool:
        """Returns whether no checkpoint and no sampler names these bytes."""
        return bool(self.database.read(f"SELECT {_UNNAMED.format('?1')}", digest)[0][0])

    def reclaimable(self) -> list[tuple[str, str, str]]:
        """Returns digest, policy and kind of removed bytes that no row names now; the policy of a
        sampler's weights is empty.
        """
        where = _UNNAMED.format("reclaim.digest")
        query = f"SELECT digest, policy, kind FROM reclaim WHERE {where}"
        return [tuple(row) for row in self.database.read(query)]

    def reclaimed(self, digest: str, policy: str) -> None:
        self._write("DELETE FROM reclaim WHERE digest = ? AND policy = ?", digest, policy)

    # internals

    def _write(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self.database.write(lambda c: c.execute(query, values).fetchall()).result()

    def _insert(self, or_: str, table: str, *values: Any) -> None:
        marks = ", ".join("?" * len(values))
        self._write(f"INSERT OR {or_} INTO {table} VALUES ({marks})", *values)

    def _page(
        self,
        kind: Any,
        where: str,
        values: Iterable[Any],
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Any]:
        table = f"{kind.__name__.lower()}s"
        query = f"SELECT * FROM {table} WHERE {where} ORDER BY rowid DESC LIMIT ? OFFSET ?"
        rows = self.database.read(query, *values, -1 if limit is None else limit, offset)
        return [_record(kind, row) for row in rows]

    def _one(self, kind: Any, what: str, tenant: str, id: str) -> Any:
        if not (found := self._page(kind, "id = ? AND tenant = ?", (id, tenant), 1)):
            raise NotFound(f"there is no {what} {id!r}"[:220])
        return found[0]

    def _ids(self, table: str, tenant: str, session: str) -> list[str]:
        query = f"SELECT id FROM {table} WHERE tenant = ? AND session = ? ORDER BY rowid"
        return [row["id"] for row in self.database.read(query, tenant, session)]


def _record(kind: Any, row: sqlite3.Row) -> Any:
    fields = dict(zip(row.keys(), row))
    for name, convert in (("details", json.loads), ("public", bool)):
        if name in fields:
            fields[name] = convert(fields[name])
    return kind(**fields)


def _no_checkpoint(path: str) -> NotFound:
    return NotFound(f"there is no checkpoint {path[:200]}")


def steady() -> Callable[[], float]:
    """Returns a clock of seconds since 1970 that reads the system's clock once and never jumps."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def iso(at: float) -> str:
    """Returns seconds since 1970 as ISO 8601."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()
