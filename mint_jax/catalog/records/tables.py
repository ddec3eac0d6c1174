"""The catalog's tables, in SQLAlchemy Core, for SQLite and PostgreSQL alike.

Times are seconds since 1970, digests are 32 raw bytes, JSON is text. Names are compared byte by
byte on both databases: PostgreSQL would otherwise order them by its locale, and pages would differ.

A revision's ``number`` (1, 2, …) is unique in its policy and never given twice. The audit log names
revisions by number, so the log stays readable after retention has removed a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa

from mint_jax.catalog.records.names import full_name

T = TypeVar("T")
VERSION = 12  # of these tables; a database of another version is refused

metadata = sa.MetaData()
version = sa.Table("catalog_version", sa.MetaData(), sa.Column("version", sa.Integer))

# SQLite numbers rows by itself only for an INTEGER key
_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Name = sa.String().with_variant(sa.VARCHAR(collation="C"), "postgresql")


class _Bytes(sa.LargeBinary):
    """Bytes as the drivers take and return them; SQLAlchemy would wrap every value."""

    cache_ok = True

    def bind_processor(self, dialect):
        return None

    def result_processor(self, dialect, coltype):
        return None


_Digest = _Bytes(32)
_Time = sa.Double()


def _table(name: str, *parts: Any) -> sa.Table:
    """A table, with a numbered ``id`` if it has no primary key."""
    keyed = any(getattr(part, "primary_key", False) for part in parts)
    number = [] if keyed else [sa.Column("id", _Id, primary_key=True, autoincrement=True)]
    return sa.Table(name, metadata, *number, *parts)


def _column(name: str, kind, *more, **options) -> sa.Column:
    """A column that is not null."""
    return sa.Column(name, kind, *more, nullable=False, **options)


def _policy(**options) -> sa.Column:
    return _column("policy_id", _Id, sa.ForeignKey("policies.id"), **options)


schemas = _table(
    "schemas",
    _column("digest", _Digest, unique=True),  # of the text, which may be too long for an index
    _column("json", sa.Text),
)

policies = _table(
    "policies",
    _column("tenant", _Name),
    _column("name", _Name),
    _column("base", sa.String),
    _column("schema_id", _Id, sa.ForeignKey("schemas.id")),
    _column("state", sa.String),  # active | retired | deleted: name free, audit entries stay
    sa.Column("keep_last", sa.Integer),  # null: keep all
    sa.Column("stand_in", _Digest),  # answers while another revision is loaded; null: none does
    _column("created_at", _Time),
    _column("touched_at", _Time),  # last change; times of one policy never go back
    _column("last_number", sa.Integer),
    _column("session_number", sa.Integer),  # fences writers: only the newest session may write
    sa.Column("session_owner", sa.String),  # null: no session is open
    sa.Column("session_expires", _Time),
    sa.Column("session_seconds", _Time),
    sa.Column("session_revision", sa.Integer),  # number of the revision it started from
    sa.UniqueConstraint("tenant", "name"),
)

packs = _table(
    "packs",
    _column("name", _Name, unique=True),
    _column("bytes", sa.BigInteger),
    # live | dead: without payloads, removed after a grace period | swept: never to be committed
    _column("state", sa.String),
    _column("changed_at", _Time),
)

payloads = _table(
    "payloads",
    sa.Column("digest", _Digest, primary_key=True),
    sa.Column("schema_id", _Id, sa.ForeignKey("schemas.id")),  # null: not an adapter
    _column("pack_id", _Id, sa.ForeignKey("packs.id"), index=True),
    _column("offset", sa.BigInteger),
    _column("length", sa.BigInteger),
    _column("created_at", _Time),
    sa.Column("finite", sa.Boolean),  # all weights are finite; null: not an adapter
)

revisions = _table(
    "revisions",
    _policy(),
    _column("number", sa.Integer),
    _column("step", sa.BigInteger),
    _column("digest", _Digest, sa.ForeignKey("payloads.digest")),
    _column("origin", sa.String),
    _column("pinned", sa.Boolean),
    _column("state", sa.String),  # live | retired
    _column("created_at", _Time),
    sa.Column("sampling", sa.Text),  # JSON, of training rollouts; null: none, or unknown
    sa.Column("training", sa.Text),  # JSON, of the updates since the export before; null: unknown
    sa.Column("merge", sa.Text),  # JSON, of a merge: method, members and weights; null: no merge
    sa.UniqueConstraint("policy_id", "number"),
    sa.Index("revisions_digest", "digest", "policy_id"),
)

canaries = _table(
    "canaries",
    _policy(),
    _column("alias", _Name),
    _column("parent", sa.Integer),  # revision numbers
    _column("candidate", sa.Integer),
    _column("digest", _Digest),  # of the candidate
    _column("share", _Time),
    _column("margin", _Time),
    _column("alpha", _Time),
    _column("state", sa.String),  # open | promoted | rolled back | ended | superseded
    _column("evidence", sa.Text),  # JSON, with the last reward's place by its source
    _column("opened_at", _Time),
    _column("updated_at", _Time),
    sa.Index("canaries_policy", "policy_id", "id"),
)

descriptions = _table(  # for routing
    "descriptions",
    _policy(primary_key=True, autoincrement=False),
    _column("vector", sa.LargeBinary),  # float16; empty: removed
    _column("examples", sa.Integer),
    _column("updated_at", _Time),
    sa.Index("descriptions_updated", "updated_at", "policy_id"),
)

aliases = _table(
    "aliases",
    _policy(primary_key=True, autoincrement=False),
    sa.Column("name", _Name, primary_key=True),
    _column("revision_id", _Id, sa.ForeignKey("revisions.id"), index=True),
    _column("version", sa.Integer),  # number of moves
    _column("updated_at", _Time),
    sa.Column("canary_id", _Id, sa.ForeignKey("canaries.id")),  # the open one; null: none
)

tags = _table(
    "tags",
    _policy(primary_key=True, autoincrement=False),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # 0: the policy itself
    sa.Column("key", _Name, primary_key=True),
    _column("value", _Name),
    sa.Index("tags_key", "key", "value"),
)

audit = _table(
    "audit",
    _column("at", _Time),
    _column("actor", sa.String),
    _column("why", sa.String),
    _column("action", sa.String),
    sa.Column("policy_id", _Id, sa.ForeignKey("policies.id")),
    sa.Column("alias", _Name),  # set where an alias moved
    sa.Column("before", sa.Integer),  # revision numbers
    sa.Column("after", sa.Integer),
    sa.Column("version", sa.Integer),  # of the alias after the move
    sa.Column("rollback_to", sa.Integer),  # version that a rollback from here restores; 0: none
    _column("details", sa.Text),
    # one id per transaction: a writer whose commit lost its connection looks for it
    _column("write", _Bytes(16)),
    # the history of an alias is a line: no two moves have one version
    sa.UniqueConstraint("policy_id", "alias", "version"),
    sa.Index("audit_policy", "policy_id", "id"),
)

checkpoints = _table(
    "checkpoints",
    _policy(),
    _column("step", sa.BigInteger),
    _column("place", sa.String),
    _column("created_at", _Time),
    sa.Index("checkpoints_policy", "policy_id", "id"),
)

rollouts = _table(
    "rollouts",
    _policy(),
    _column("step", sa.BigInteger),
    _column("digest", _Digest, sa.ForeignKey("payloads.digest"), index=True),
    _column("tokens", sa.BigInteger),
    _column("mean_reward", _Time),
    _column("created_at", _Time),
    sa.Index("rollouts_policy", "policy_id", "id"),
)

_REMOVED = sa.ForeignKey("revisions.id", ondelete="SET NULL")
evaluations = _table(
    "evaluations",
    sa.Column("revision_id", _Id, _REMOVED, index=True),  # null once retention removed it
    _column("digest", _Digest, index=True),
    _column("base", sa.String),
    _column("renderer", sa.String),
    _column("scorer", sa.String),
    _column("dataset", sa.String),
    _column("seed", sa.BigInteger),
    _column("metrics", sa.Text),
    _column("isolated", _Time),  # score with this revision loaded alone
    _column("shared", _Time),  # score in a batch with other revisions
    _column("created_at", _Time),
)

leases = _table(
    "leases",
    _column("digest", _Digest, sa.ForeignKey("payloads.digest"), index=True),
    _column("owner", sa.String),
    _column("expires_at", _Time, index=True),
)


def as_record(kind: Callable[..., T], row: Any, **given: Any) -> T:
    """Returns a dataclass whose fields are a row's columns, except those ``given``. Digests are
    hex, ``policy`` is the full name, None for a row without a policy.
    """
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name == "policy" and "policy" not in given:
            given["policy"] = None if row.tenant is None else full_name(row.tenant, row.name)
        elif field.name not in given:
            value = getattr(row, field.name)
            given[field.name] = value.hex() if isinstance(value, bytes) else value
    return kind(**given)
