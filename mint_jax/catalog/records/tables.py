"""The catalog's tables, in SQLAlchemy Core; ``migrations/`` makes them, in steps.

Written for SQLite and PostgreSQL alike. Times are seconds since 1970, digests are 32 raw bytes,
JSON is text. Names are compared byte by byte in both (PostgreSQL would otherwise order them by its
locale, and pages would differ).

A revision is known inside its policy by ``number`` (1, 2, …), which is never given twice; the audit
log names revisions by it, so the log still reads after retention has removed a row.

The rows that a name leads through carry a checksum. A flipped bit in an index of SQLite's file lets
a statement find another row than the one asked for, with nothing to show it by: SQLite takes the
columns of the key from the index. The checksum is in no index, so the row that was found says whose
it is.
"""

import zlib

import sqlalchemy as sa

# the newest migration: databases behind it are upgraded when opened, ones ahead are refused
HEAD = "0006"
VERSION_TABLE = "catalog_version"

metadata = sa.MetaData()

# SQLite counts rows for an INTEGER key alone
_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Name = sa.String().with_variant(sa.VARCHAR(collation="C"), "postgresql")


class _Bytes(sa.LargeBinary):
    """Bytes as the drivers take and give them; SQLAlchemy would wrap every value."""

    cache_ok = True

    def bind_processor(self, dialect):
        return None

    def result_processor(self, dialect, coltype):
        return None


_Digest = _Bytes(32)
_Time = sa.Double()


def _id() -> sa.Column:
    return sa.Column("id", _Id, primary_key=True, autoincrement=True)


def _policy() -> sa.Column:
    return sa.Column("policy_id", _Id, sa.ForeignKey("policies.id"), nullable=False)


schemas = sa.Table(
    "schemas",
    metadata,
    _id(),
    # of the text, which may be too long for an index
    sa.Column("digest", _Digest, nullable=False, unique=True),
    sa.Column("json", sa.Text, nullable=False),
)

policies = sa.Table(
    "policies",
    metadata,
    _id(),
    sa.Column("tenant", _Name, nullable=False),
    sa.Column("name", _Name, nullable=False),
    sa.Column("base", sa.String, nullable=False),
    sa.Column("schema_id", _Id, sa.ForeignKey("schemas.id"), nullable=False),
    sa.Column(
        "parent_revision",
        _Id,
        sa.ForeignKey("revisions.id", name="policies_parent", use_alter=True),
        index=True,
    ),
    # active | retired | deleted: its name is free, its audit entries stay
    sa.Column("state", sa.String, nullable=False),
    sa.Column("keep_last", sa.Integer),  # null: keep all
    sa.Column("created_at", _Time, nullable=False),
    # of its last change; times of one policy never go back
    sa.Column("touched_at", _Time, nullable=False),
    sa.Column("last_number", sa.Integer, nullable=False),
    # fences writers: only the newest session may write
    sa.Column("session_number", sa.Integer, nullable=False),
    sa.Column("session_owner", sa.String),  # null: no session is open
    sa.Column("session_expires", _Time),
    sa.Column("session_seconds", _Time),
    sa.Column("session_revision", sa.Integer),  # number of the revision it started from
    sa.Column("checksum", sa.BigInteger),  # policy_checksum
    sa.UniqueConstraint("tenant", "name"),
)

packs = sa.Table(
    "packs",
    metadata,
    _id(),
    sa.Column("name", _Name, nullable=False, unique=True),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    # live | dead: named by no payload, its file goes after a grace period
    sa.Column("state", sa.String, nullable=False),
    sa.Column("changed_at", _Time, nullable=False),
)

payloads = sa.Table(
    "payloads",
    metadata,
    sa.Column("digest", _Digest, primary_key=True),
    sa.Column("schema_id", _Id, sa.ForeignKey("schemas.id")),  # null: not an adapter
    sa.Column("pack_id", _Id, sa.ForeignKey("packs.id"), nullable=False, index=True),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("length", sa.BigInteger, nullable=False),
    sa.Column("created_at", _Time, nullable=False),
    # whether all weights are; null: not checked, as before this column was
    sa.Column("finite", sa.Boolean),
)

revisions = sa.Table(
    "revisions",
    metadata,
    _id(),
    _policy(),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("digest", _Digest, sa.ForeignKey("payloads.digest"), nullable=False),
    sa.Column("origin", sa.String, nullable=False),
    sa.Column("pinned", sa.Boolean, nullable=False),
    sa.Column("state", sa.String, nullable=False),  # live | retired
    sa.Column("created_at", _Time, nullable=False),
    # JSON: how training drew its rollouts; null: it drew none, or the exporter did not say
    sa.Column("sampling", sa.Text),
    sa.Column("checksum", sa.BigInteger),  # revision_checksum
    sa.UniqueConstraint("policy_id", "number"),
    sa.Index("revisions_digest", "digest", "policy_id"),
)

aliases = sa.Table(
    "aliases",
    metadata,
    sa.Column(
        "policy_id", _Id, sa.ForeignKey("policies.id"), primary_key=True, autoincrement=False
    ),
    sa.Column("name", _Name, primary_key=True),
    sa.Column("revision_id", _Id, sa.ForeignKey("revisions.id"), nullable=False, index=True),
    sa.Column("version", sa.Integer, nullable=False),  # moves so far
    sa.Column("updated_at", _Time, nullable=False),
    sa.Column("checksum", sa.BigInteger),  # alias_checksum
)

tags = sa.Table(
    "tags",
    metadata,
    sa.Column(
        "policy_id", _Id, sa.ForeignKey("policies.id"), primary_key=True, autoincrement=False
    ),
    # of a revision; 0: of the policy itself
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("key", _Name, primary_key=True),
    sa.Column("value", _Name, nullable=False),
    sa.Index("tags_key", "key", "value"),
)

audit = sa.Table(
    "audit",
    metadata,
    _id(),
    sa.Column("at", _Time, nullable=False),
    sa.Column("actor", sa.String, nullable=False),
    sa.Column("why", sa.String, nullable=False),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("policy_id", _Id, sa.ForeignKey("policies.id")),
    sa.Column("alias", _Name),  # set where an alias moved
    sa.Column("before", sa.Integer),  # revision numbers
    sa.Column("after", sa.Integer),
    sa.Column("version", sa.Integer),  # of the alias after the move
    sa.Column("under", sa.Integer),  # the version a rollback from here returns to, 0 for none
    sa.Column("details", sa.Text, nullable=False),
    # of the transaction: who lost the answer to a commit finds it by this
    sa.Column("write", _Bytes(16), nullable=False),
    # Two moves cannot both be an alias's n-th: its history is a line, by the database's own word.
    sa.UniqueConstraint("policy_id", "alias", "version"),
    sa.Index("audit_policy", "policy_id", "id"),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    _id(),
    _policy(),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("place", sa.String, nullable=False),
    sa.Column("created_at", _Time, nullable=False),
    sa.Index("checkpoints_policy", "policy_id", "id"),
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    _id(),
    _policy(),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("digest", _Digest, sa.ForeignKey("payloads.digest"), nullable=False, index=True),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("mean_reward", _Time, nullable=False),
    sa.Column("created_at", _Time, nullable=False),
    sa.Index("rollouts_policy", "policy_id", "id"),
)

evaluations = sa.Table(
    "evaluations",
    metadata,
    _id(),
    # null once retention removed it
    sa.Column("revision_id", _Id, sa.ForeignKey("revisions.id", ondelete="SET NULL"), index=True),
    sa.Column("digest", _Digest, nullable=False, index=True),
    sa.Column("base", sa.String, nullable=False),
    sa.Column("renderer", sa.String, nullable=False),
    sa.Column("scorer", sa.String, nullable=False),
    sa.Column("dataset", sa.String, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("metrics", sa.Text, nullable=False),
    sa.Column("isolated", _Time, nullable=False),  # score with this revision loaded alone
    sa.Column("shared", _Time, nullable=False),  # score in a batch with other revisions
    sa.Column("created_at", _Time, nullable=False),
)

operations = sa.Table(
    "operations",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("tenant", _Name, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("key", _Name, nullable=False),
    sa.Column("state", sa.String, nullable=False),  # running | done | failed
    sa.Column("request", sa.Text, nullable=False),
    sa.Column("result", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("created_at", _Time, nullable=False),
    sa.Column("finished_at", _Time, index=True),
    sa.UniqueConstraint("tenant", "key"),
)

leases = sa.Table(
    "leases",
    metadata,
    _id(),
    sa.Column("digest", _Digest, sa.ForeignKey("payloads.digest"), nullable=False, index=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("expires_at", _Time, nullable=False, index=True),
)


def policy_checksum(policy_id: int, tenant: str, name: str) -> int:
    """Of a policy's row: who it is."""
    return zlib.crc32(f"{policy_id}/{tenant}/{name}".encode())


def revision_checksum(policy_id: int, number: int, digest: bytes, schema_digest: bytes) -> int:
    """Of a revision's row: which revision of which policy it is, its bytes and their schema."""
    return zlib.crc32(f"{policy_id}@{number}/{digest.hex()}/{schema_digest.hex()}".encode())


def alias_checksum(policy_id: int, name: str, version: int, number: int, digest: bytes) -> int:
    """Of an alias's row: its last move, and the revision that it then named."""
    return zlib.crc32(f"{policy_id}@{name}/{version}/{number}/{digest.hex()}".encode())
