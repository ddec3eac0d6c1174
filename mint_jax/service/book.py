"""Who is served: sessions, models, samplers and checkpoints, as rows of one SQLite database.

What they hold lies elsewhere: training states in the journal's folder, adapters in the catalog,
checkpoints in files. A row of another tenant is as if it were not there; only a published
checkpoint is seen by all. Whatever creates a row may be sent again, and finds it.

Rows are in the order in which they were made (SQLite's ``rowid``), whatever the clock said then.
Times of day are shown to people, and end what has a time to live; they come from ``steady``, so
that a clock which is set while the server runs moves none of them.
"""

import contextlib
import dataclasses
import datetime
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import sqlite

from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError

META = sa.MetaData()
SESSIONS = sa.Table(
    "sessions", META,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("tenant", sa.String, nullable=False, index=True),
    sa.Column("told", sa.JSON, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("ended", sa.Float),
)  # fmt: skip
MODELS = sa.Table(
    "models", META,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("session", sa.String, nullable=False, index=True),
    sa.Column("tenant", sa.String, nullable=False, index=True),
    sa.Column("told", sa.JSON, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("ended", sa.Float),
)  # fmt: skip
POINTS = sa.Table(
    "points", META,
    sa.Column("model", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("loss", sa.Float),
    sa.Column("grad_norm", sa.Float),
)  # fmt: skip
SAMPLERS = sa.Table(
    "samplers", META,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("session", sa.String, nullable=False, index=True),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("path", sa.String),
    sa.Column("digest", sa.String, index=True),
    sa.Column("clients", sa.Integer, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)  # fmt: skip
CHECKPOINTS = sa.Table(
    "checkpoints", META,
    sa.Column("model", sa.String, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("tenant", sa.String, nullable=False, index=True),
    sa.Column("digest", sa.String, nullable=False, index=True),
    sa.Column("nbytes", sa.Integer, nullable=False),
    sa.Column("request", sa.String, nullable=False),
    sa.Column("told", sa.JSON, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("expires", sa.Float),
    sa.Column("public", sa.Boolean, nullable=False),
)  # fmt: skip
# Bytes that a removed row named. They are deleted once no row names them, and so are their rows
# here.
RECLAIM = sa.Table(
    "reclaim", META,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("policy", sa.String, primary_key=True),
    sa.Column("kind", sa.String, nullable=False),
)  # fmt: skip
STARTS = sa.Table("starts", META, sa.Column("number", sa.Integer, primary_key=True))
SECONDS = ("prefill_s", "decode_s", "train_s", "update_s", "load_s")
SUMS = (*SECONDS, "prefill_tokens", "decode_tokens", "train_tokens")
COSTS = sa.Table(
    "costs", META,
    sa.Column("tenant", sa.String, primary_key=True),
    sa.Column("policy", sa.String, primary_key=True, index=True),
    *(sa.Column(name, sa.Float, nullable=False) for name in SECONDS),
    *(sa.Column(name, sa.Integer, nullable=False) for name in SUMS[len(SECONDS) :]),
)  # fmt: skip


class NotFound(UserError):
    """There is no such thing, or it is another tenant's."""


@dataclasses.dataclass(frozen=True)
class Session:
    """A client's session; ``told`` is what the client says of it: tags, metadata, a display
    name.
    """

    id: str
    tenant: str
    told: dict[str, Any]
    created: float
    ended: float | None


@dataclasses.dataclass(frozen=True)
class Model:
    """A policy that is or was trained; ``told`` has its rank, what it adapts and the user's
    metadata.
    """

    id: str
    session: str
    tenant: str
    told: dict[str, Any]
    created: float
    ended: float | None


class Point(NamedTuple):
    """An update of a policy: the loss of a target before it, None where there was none or it was
    not finite; the gradient's norm.
    """

    at: float
    loss: float | None
    grad_norm: float | None


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Who samples: the bare base, or for good the weights of one digest."""

    id: str
    session: str
    tenant: str
    path: str | None
    digest: str | None
    clients: int
    created: float


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's weights under a name.

    Attributes:
        kind: ``weights``, ``sampler_weights`` or ``external_weights``.
        digest: of its bytes.
        request: which one made it.
        told: rank, what is adapted, the user's metadata.
        expires: seconds since 1970; None: never.
    """

    model: str
    kind: str
    name: str
    tenant: str
    digest: str
    nbytes: int
    request: str
    told: dict[str, Any]
    created: float
    expires: float | None
    public: bool

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"

    @property
    def policy(self) -> str:
        """The catalog's policy whose revision a sampler checkpoint is; a copy's is that of its
        source.
        """
        return self.told.get("policy") or f"{self.tenant}/{self.model}"


class Book:
    """All rows; may be called from any thread. What a change returns from is on the disk.

    Args:
        path: of the database's file.
        clock: seconds since 1970; None: ``steady``.
    """

    def __init__(self, path: Path, clock: Callable[[], float] | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.clock = clock or steady()
        self._owners: dict[str, str] = {}
        self._engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 30.0})
        with self._engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            META.create_all(connection)

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        """A transaction.

        Raises:
            DatabaseFailed: it cannot be written, say because the disk is full; nothing is changed.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except exc.OperationalError as error:
            place = self._engine.url.database
            raise DatabaseFailed(
                f"{place} cannot be written ({error.orig}): nothing was changed; free space on its"
                " disk"
            ) from error

    # -- sessions

    def open_session(self, tenant: str, told: Mapping[str, Any], id: str | None = None) -> str:
        """The id of a new session; of one that is named, and made unless it is there, ``id``."""
        id = id or uuid.uuid4().hex
        self._insert(SESSIONS, id=id, tenant=tenant, told=dict(told), created=self.clock())
        return id

    def session(self, tenant: str, id: str) -> Session:
        return self._one(Session, SESSIONS, f"session {id!r}", tenant, SESSIONS.c.id == id)

    def sessions(self, tenant: str, limit: int | None = None, offset: int = 0) -> list[Session]:
        """The newest first."""
        return self._page(Session, SESSIONS, tenant, limit, offset)

    def tell_session(self, session: Session, **more: Any) -> None:
        """Adds to what the client says of a session."""
        with self._write() as connection:
            told = connection.execute(
                sa.select(SESSIONS.c.told).where(SESSIONS.c.id == session.id)
            ).scalar_one()
            connection.execute(
                SESSIONS.update().where(SESSIONS.c.id == session.id).values(told=told | more)
            )

    def end_session(self, id: str) -> list[str]:
        """Ends a session, and returns its models that had not ended."""
        with self._write() as connection:
            connection.execute(
                SESSIONS.update()
                .where(SESSIONS.c.id == id, SESSIONS.c.ended.is_(None))
                .values(ended=self.clock())
            )
            mine = (MODELS.c.session == id, MODELS.c.ended.is_(None))
            found = list(connection.scalars(sa.select(MODELS.c.id).where(*mine)))
            connection.execute(MODELS.update().where(*mine).values(ended=self.clock()))
        return found

    def open_sessions(self) -> dict[str, str]:
        """Tenants of the sessions that have not ended, by id."""
        query = sa.select(SESSIONS.c.id, SESSIONS.c.tenant).where(SESSIONS.c.ended.is_(None))
        with self._engine.connect() as connection:
            return dict(connection.execute(query).tuples().all())

    def count_start(self) -> int:
        """Counts a start of the server, and returns its number: 1, 2, …"""
        with self._write() as connection:
            return connection.execute(STARTS.insert().values(number=None)).inserted_primary_key[0]  # type: ignore[index]

    # -- models

    def add_model(self, session: str, number: int, tenant: str, told: Mapping[str, Any]) -> Model:
        """A session's model of this number, which is made unless it is there."""
        id = f"{session}:train:{number}"
        self._insert(
            MODELS, id=id, session=session, tenant=tenant, told=dict(told), created=self.clock()
        )
        return self.model(tenant, id)

    def model(self, tenant: str, id: str) -> Model:
        return self._one(Model, MODELS, f"model {id!r}", tenant, MODELS.c.id == id)

    def owner(self, model: str) -> str:
        """Whose a model is."""
        if (tenant := self._owners.get(model)) is None:
            with self._engine.connect() as connection:
                tenant = connection.execute(
                    sa.select(MODELS.c.tenant).where(MODELS.c.id == model)
                ).scalar()
            if tenant is None:
                raise NotFound(f"there is no model {model[:200]!r}")
            self._owners[model] = tenant
        return tenant

    def tell_of_model(self, id: str, told: Mapping[str, Any]) -> None:
        with self._write() as connection:
            connection.execute(MODELS.update().where(MODELS.c.id == id).values(told=dict(told)))

    def end_model(self, id: str) -> None:
        with self._write() as connection:
            connection.execute(
                MODELS.update()
                .where(MODELS.c.id == id, MODELS.c.ended.is_(None))
                .values(ended=self.clock())
            )

    def has_ended(self, model: str) -> bool:
        """Whether a model has ended; True for one that is not there."""
        query = sa.select(MODELS.c.id).where(MODELS.c.id == model, MODELS.c.ended.is_(None))
        with self._engine.connect() as connection:
            return connection.execute(query).first() is None

    def living(self, tenant: str) -> list[Model]:
        """A tenant's models that have not ended."""
        with self._engine.connect() as connection:
            rows = connection.execute(
                sa.select(MODELS).where(MODELS.c.tenant == tenant, MODELS.c.ended.is_(None))
            )
            return [Model(**row._mapping) for row in rows]

    def models(
        self, tenant: str, limit: int, offset: int, project: str | None = None
    ) -> list[Model]:
        """The newest first; of one project's sessions, or of all."""
        return self._page(Model, MODELS, tenant, limit, offset, *_in_project(project))

    def models_of(self, tenant: str, session: str) -> list[str]:
        return self._ids(MODELS, tenant, session)

    def count_models(self, tenant: str, project: str | None = None) -> int:
        return self._count(MODELS, tenant, *_in_project(project))

    # -- how training goes

    def add_points(self, points: Mapping[str, Sequence[Point]]) -> None:
        """Further updates of models, in order: all of them, or none where this raises."""
        last = sa.select(sa.func.coalesce(sa.func.max(POINTS.c.number), 0))
        with self._write() as connection:
            for model, some in points.items():
                start = connection.execute(last.where(POINTS.c.model == model)).scalar_one() + 1
                rows = [
                    {"model": model, "number": start + i, **point._asdict()}
                    for i, point in enumerate(some)
                ]
                connection.execute(POINTS.insert(), rows)

    def points(self, model: str, most: int) -> list[tuple[int, Point]]:
        """A model's updates with their numbers from 1, evenly thinned to at most ``most`` and the
        last one.
        """
        mine = POINTS.c.model == model
        with self._engine.connect() as connection:
            last = (
                connection.execute(sa.select(sa.func.max(POINTS.c.number)).where(mine)).scalar()
                or 0
            )
            kept = sa.or_(POINTS.c.number % max(1, -(-last // most)) == 0, POINTS.c.number == last)
            found = connection.execute(
                sa.select(POINTS).where(mine, kept).order_by(POINTS.c.number)
            )
            return [(row.number, Point(row.at, row.loss, row.grad_norm)) for row in found]

    # -- samplers

    def add_sampler(
        self, session: str, number: int, tenant: str, path: str | None, digest: str | None
    ) -> Sampler:
        """A session's sampler of this number, which is made unless it is there."""
        id = f"{session}:sample:{number}"
        made = {"path": path, "digest": digest, "clients": 1, "created": self.clock()}
        self._insert(SAMPLERS, id=id, session=session, tenant=tenant, **made)
        return self.sampler(tenant, id)

    def sampler(self, tenant: str, id: str) -> Sampler:
        return self._one(Sampler, SAMPLERS, f"sampling session {id!r}", tenant, SAMPLERS.c.id == id)

    def join_sampler(self, tenant: str, id: str) -> int:
        """The number of one more client of a sampler."""
        self.sampler(tenant, id)
        with self._write() as connection:
            query = (
                SAMPLERS.update()
                .where(SAMPLERS.c.id == id)
                .values(clients=SAMPLERS.c.clients + 1)
                .returning(SAMPLERS.c.clients)
            )
            return connection.execute(query).scalar_one() - 1

    def samplers_of(self, tenant: str, session: str) -> list[str]:
        return self._ids(SAMPLERS, tenant, session)

    def remove_snapshots(self, seconds: float, limit: int = 256) -> int:
        """Removes samplers of unnamed weights whose session ended more than ``seconds`` ago, at
        most ``limit``; returns how many.
        """
        query = sa.select(SAMPLERS.c.id).join(SESSIONS, SAMPLERS.c.session == SESSIONS.c.id)
        query = query.where(
            SESSIONS.c.ended < self.clock() - seconds,
            SAMPLERS.c.path.is_(None),
            SAMPLERS.c.digest.is_not(None),
        )
        with self._write() as connection:
            gone = (
                SAMPLERS.delete()
                .where(SAMPLERS.c.id.in_(query.limit(limit)))
                .returning(SAMPLERS.c.digest)
            )
            digests = list(connection.scalars(gone))
            self._offer(
                connection,
                [{"digest": one, "policy": "", "kind": "sampler_weights"} for one in digests],
            )
        return len(digests)

    # -- checkpoints

    def need_free(self, model: str, kind: str, name: str, request: str) -> None:
        """
        Raises:
            UserError: the name is taken by what another request saved.
        """
        with self._engine.connect() as connection:
            found = connection.execute(
                sa.select(CHECKPOINTS.c.request).where(*_key(model, kind, name))
            ).first()
        if found is not None and found.request != request:
            raise UserError(
                f"tinker://{model}/{kind}/{name} exists already: choose another name, or save with"
                " overwrite"
            )

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Adds a row, or replaces the one of its name; the replaced row's bytes may then be
        reclaimed.

        The caller checks with ``need_free`` whether it may replace a row, and runs one save of a
        model after another.
        """
        gone = (
            CHECKPOINTS.delete()
            .where(*_key(checkpoint.model, checkpoint.kind, checkpoint.name))
            .returning(CHECKPOINTS)
        )
        with self._write() as connection:
            replaced = [Checkpoint(**row._mapping) for row in connection.execute(gone).all()]
            connection.execute(CHECKPOINTS.insert().values(**dataclasses.asdict(checkpoint)))
            self._offer(
                connection, [_reclaim(row) for row in replaced if row.digest != checkpoint.digest]
            )

    def checkpoint(
        self, tenant: str, model: str, kind: str, name: str, published: bool = False
    ) -> Checkpoint:
        """One of the tenant's own; or, with ``published``, anybody's that is public.

        Raises:
            NotFound: also where it has expired.
        """
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(CHECKPOINTS).where(*_key(model, kind, name))).first()
        found = None if row is None else Checkpoint(**row._mapping)
        expired = found is not None and found.expires is not None and found.expires <= self.clock()
        if (
            found is None
            or expired
            or (found.tenant != tenant and not (published and found.public))
        ):
            raise NotFound(f"there is no checkpoint {f'tinker://{model}/{kind}/{name}'[:200]}")
        return found

    def checkpoints(
        self, tenant: str, model: str | None = None, limit: int | None = None, offset: int = 0
    ) -> list[Checkpoint]:
        """The newest first; of one model, or of all."""
        query = sa.select(CHECKPOINTS).where(*self._mine(tenant, model)).order_by(_ROWID.desc())
        with self._engine.connect() as connection:
            return [
                Checkpoint(**row._mapping)
                for row in connection.execute(query.limit(limit).offset(offset))
            ]

    def checkpoint_bytes(self, tenant: str) -> int:
        """Of all that a tenant has, each content once."""
        each = (
            sa.select(CHECKPOINTS.c.digest, CHECKPOINTS.c.nbytes)
            .where(*self._mine(tenant, None))
            .distinct()
            .subquery()
        )
        with self._engine.connect() as connection:
            return connection.execute(
                sa.select(sa.func.coalesce(sa.func.sum(each.c.nbytes), 0))
            ).scalar_one()

    def checkpoint_totals(self, tenant: str, session: str) -> tuple[int, int]:
        """How many checkpoints a session's models have, and their bytes."""
        models = sa.select(MODELS.c.id).where(
            MODELS.c.tenant == tenant, MODELS.c.session == session
        )
        query = sa.select(
            sa.func.count(), sa.func.coalesce(sa.func.sum(CHECKPOINTS.c.nbytes), 0)
        ).select_from(CHECKPOINTS)
        with self._engine.connect() as connection:
            return tuple(
                connection.execute(
                    query.where(CHECKPOINTS.c.tenant == tenant, CHECKPOINTS.c.model.in_(models))
                ).one()
            )  # type: ignore[return-value]

    def count_checkpoints(self, tenant: str) -> int:
        with self._engine.connect() as connection:
            return connection.execute(
                sa.select(sa.func.count()).select_from(CHECKPOINTS).where(*self._mine(tenant, None))
            ).scalar_one()

    def _mine(self, tenant: str, model: str | None) -> list[Any]:
        living = sa.or_(CHECKPOINTS.c.expires.is_(None), CHECKPOINTS.c.expires > self.clock())
        return [
            CHECKPOINTS.c.tenant == tenant,
            living,
            *([] if model is None else [CHECKPOINTS.c.model == model]),
        ]

    def change_checkpoint(self, checkpoint: Checkpoint, **values: Any) -> None:
        """Sets ``expires`` or ``public`` of the tenant's checkpoint of this path.

        Raises:
            NotFound: it was removed, or has expired.
        """
        key = (
            *_key(checkpoint.model, checkpoint.kind, checkpoint.name),
            *self._mine(checkpoint.tenant, None),
        )
        with self._write() as connection:
            changed = connection.execute(CHECKPOINTS.update().where(*key).values(**values)).rowcount
        if not changed:
            raise NotFound(f"there is no checkpoint {checkpoint.path[:200]}")

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Removes the tenant's checkpoint of this path, whatever was saved under it last. Its bytes
        may then be reclaimed.

        Raises:
            NotFound: there is none.
        """
        key = (
            *_key(checkpoint.model, checkpoint.kind, checkpoint.name),
            CHECKPOINTS.c.tenant == checkpoint.tenant,
        )
        if not self._remove(*key):
            raise NotFound(f"there is no checkpoint {checkpoint.path[:200]}")

    def remove_expired(self) -> int:
        """Removes the checkpoints whose time to live is over, and returns how many."""
        return self._remove(CHECKPOINTS.c.expires <= self.clock())

    def _remove(self, *where: Any) -> int:
        """One transaction: a row that is saved or kept for longer meanwhile is seen as it is
        then.
        """
        with self._write() as connection:
            found = connection.execute(
                CHECKPOINTS.delete().where(*where).returning(CHECKPOINTS)
            ).all()
            self._offer(connection, [_reclaim(Checkpoint(**row._mapping)) for row in found])
        return len(found)

    def unused(self, digest: str) -> bool:
        """Whether no checkpoint and no sampler names these bytes."""
        with self._engine.connect() as connection:
            return (
                connection.execute(
                    sa.select(sa.literal(1)).where(_unnamed(sa.literal(digest)))
                ).first()
                is not None
            )

    def named(self) -> set[str]:
        """The digests of all checkpoints."""
        with self._engine.connect() as connection:
            return set(connection.scalars(sa.select(CHECKPOINTS.c.digest).distinct()))

    def reclaimable(self) -> list[tuple[str, str, str]]:
        """Digest, policy and kind of removed checkpoints whose bytes no row names now; a sampler's
        weights may have no policy.
        """
        query = sa.select(RECLAIM.c.digest, RECLAIM.c.policy, RECLAIM.c.kind).where(
            _unnamed(RECLAIM.c.digest)
        )
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(query)]

    def reclaimed(self, digest: str, policy: str) -> None:
        """Notes that bytes are deleted."""
        with self._write() as connection:
            connection.execute(
                RECLAIM.delete().where(RECLAIM.c.digest == digest, RECLAIM.c.policy == policy)
            )

    @staticmethod
    def _offer(connection: sa.Connection, rows: list[dict[str, str]]) -> None:
        if rows:
            connection.execute(RECLAIM.insert().prefix_with("OR IGNORE"), rows)

    # -- what was spent

    def add_costs(self, costs: Mapping[tuple[str, str], Mapping[str, float]]) -> None:
        """Adds to what (tenant, policy) have cost: all of it, or nothing where this raises."""
        rows = [
            {"tenant": tenant, "policy": policy, **sums} for (tenant, policy), sums in costs.items()
        ]
        query = sqlite.insert(COSTS)
        sums = {name: COSTS.c[name] + query.excluded[name] for name in SUMS}
        with self._write() as connection:
            connection.execute(
                query.on_conflict_do_update(index_elements=["tenant", "policy"], set_=sums), rows
            )

    def costs(
        self, by: str, tenant: str | None, limit: int | None, offset: int
    ) -> list[tuple[str, dict[str, Any]]]:
        """Sums by ``tenant`` or ``policy``, the largest first; of all tenants, or of one."""
        query = (
            _sums(COSTS.c[by]).order_by(_SECONDS.desc(), COSTS.c[by]).limit(limit).offset(offset)
        )
        return self._named(query if tenant is None else query.where(COSTS.c.tenant == tenant))

    def costs_of(self, policies: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """Sums of these policies, where there are any; at most some hundred."""
        return self._named(_sums(COSTS.c.policy).where(COSTS.c.policy.in_(policies)))

    def _named(self, query: sa.Select[Any]) -> list[tuple[str, dict[str, Any]]]:
        with self._engine.connect() as connection:
            return [(row[0], dict(zip(SUMS, row[1:]))) for row in connection.execute(query)]

    # -- how

    def _insert(self, table: sa.Table, **values: Any) -> None:
        """Unless its key is there."""
        with self._write() as connection:
            connection.execute(table.insert().prefix_with("OR IGNORE").values(**values))

    def _one(self, kind: Any, table: sa.Table, what: str, tenant: str, *where: Any) -> Any:
        with self._engine.connect() as connection:
            row = connection.execute(
                sa.select(table).where(table.c.tenant == tenant, *where)
            ).first()
        if row is None:
            raise NotFound(f"there is no {what[:200]}")
        return kind(**row._mapping)

    def _page(
        self, kind: Any, table: sa.Table, tenant: str, limit: int | None, offset: int, *where: Any
    ) -> list[Any]:
        query = (
            sa.select(table)
            .where(table.c.tenant == tenant, *where)
            .order_by(_ROWID.desc())
            .limit(limit)
            .offset(offset)
        )
        with self._engine.connect() as connection:
            return [kind(**row._mapping) for row in connection.execute(query)]

    def _ids(self, table: sa.Table, tenant: str, session: str) -> list[str]:
        query = (
            sa.select(table.c.id)
            .where(table.c.tenant == tenant, table.c.session == session)
            .order_by(_ROWID)
        )
        with self._engine.connect() as connection:
            return list(connection.scalars(query))

    def _count(self, table: sa.Table, tenant: str, *where: Any) -> int:
        with self._engine.connect() as connection:
            return connection.execute(
                sa.select(sa.func.count())
                .select_from(table)
                .where(table.c.tenant == tenant, *where)
            ).scalar_one()


def _in_project(project: str | None) -> tuple[Any, ...]:
    """The condition that a model's session is of a project."""
    if project is None:
        return ()
    return (
        MODELS.c.session.in_(
            sa.select(SESSIONS.c.id).where(SESSIONS.c.told["project_id"].as_string() == project)
        ),
    )


_ROWID = sa.literal_column("rowid")
_SECONDS = sum((sa.func.sum(COSTS.c[name]) for name in SECONDS), sa.literal(0.0))


def _sums(by: sa.Column[Any]) -> sa.Select[Any]:
    return sa.select(by, *(sa.func.sum(COSTS.c[name]) for name in SUMS)).group_by(by)


def _key(model: str, kind: str, name: str) -> Iterable[Any]:
    return CHECKPOINTS.c.model == model, CHECKPOINTS.c.kind == kind, CHECKPOINTS.c.name == name


def _reclaim(row: Checkpoint) -> dict[str, str]:
    return {"digest": row.digest, "policy": row.policy, "kind": row.kind}


def _unnamed(digest: Any) -> Any:
    """Whether no checkpoint and no sampler names a digest."""
    return sa.and_(
        *(~sa.exists().where(table.c.digest == digest) for table in (CHECKPOINTS, SAMPLERS))
    )


def steady(
    wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """A clock of seconds since 1970 that reads the system's clock once, now, and counts on by
    itself.
    """
    offset = wall() - monotonic()
    return lambda: offset + monotonic()


def iso(at: float) -> str:
    """ISO 8601 of seconds since 1970."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()
