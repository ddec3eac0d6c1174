"""What was lost and what comes back.

Commits that a database has lost are recorded in the audit log when it is next opened, and reported
until a user accepts the loss.

Adapters that lie in packs and that no record names, as after a database was lost, become revisions
again. A pack lists its objects and an object what adapter it is, but not whose: names, aliases and
scores are the database's alone. So each gets a policy of its own, named by its digest, to be looked
at, branched and promoted.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import sqlalchemy as sa

from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records import audit
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import Database, chunks
from mint_jax.catalog.records.exports import Export, schema_text
from mint_jax.catalog.records.tables import audit as log
from mint_jax.catalog.records.tables import payloads
from mint_jax.catalog.storage.payloads import (
    PackDamaged,
    PackInfo,
    PackMissing,
    PayloadStore,
    Place,
)
from mint_jax.errors import UserError

TEMPLATE = "recovered-{digest}"
BATCH = 256  # adapters of a transaction


@dataclasses.dataclass
class Recovered:
    """What was, or would be, recovered.

    Attributes:
        revisions: name, digest, rank, base and bytes of each.
        left: what could not be, and why: damaged packs and objects, and objects that are no
            adapters.
    """

    dry_run: bool
    revisions: list[dict[str, str | int]] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)


def find(
    database: Database,
    store: PayloadStore,
    template: str,
    older_than: float,
    report: Recovered,
    progress: Callable[[int], None] | None,
) -> Iterator[Export]:
    """Exports of the adapters that no record names; adds to ``report`` what they are.

    Args:
        template: of their policies' names; ``{digest}`` is the first half of the digest.
        older_than: leaves alone packs that are younger, in seconds since 1970: their writer may be
            about to commit.
        progress: called with the number of packs looked at.

    Raises:
        UserError: a template without ``{digest}``.
    """
    if "{digest}" not in template:
        raise UserError(
            f"the names' template is {template!r}; expected one with {{digest}}, for instance"
            f" {TEMPLATE!r}"
        )
    seen: set[str] = set()
    for done, pack in enumerate(store.packs()):
        if pack.mtime < older_than:
            for digest, place in _unnamed(database, store, pack, report):
                if digest in seen:
                    continue
                seen.add(digest)
                try:
                    data = store.read(place, digest)
                    schema = Schema.from_json(schema_text(data))
                except UserError as error:
                    report.left.append(f"{digest[:12]}: {error}")
                    continue
                name = template.replace("{digest}", digest[:32])
                about = {
                    "digest": digest,
                    "rank": schema.config.rank,
                    "base": schema.base,
                    "bytes": place.length,
                }
                report.revisions.append({"name": name} | about)
                yield Export(name, data, 0, origin=f"recovered from pack {pack.name}", force=True)
        if progress is not None:
            progress(done + 1)


def _unnamed(
    database: Database, store: PayloadStore, pack: PackInfo, report: Recovered
) -> list[tuple[str, Place]]:
    """The objects of a pack that are no payloads of the catalog."""
    try:
        objects = store.index(pack.name)
    except (PackMissing, PackDamaged) as error:
        report.left.append(f"pack {pack.name}: {error}")
        return []
    known: set[bytes] = set()
    for some in chunks([bytes.fromhex(digest) for digest, _ in objects]):
        known |= database.read(lambda c, some=some: _known(c, some))
    return [(digest, place) for digest, place in objects if bytes.fromhex(digest) not in known]


def _known(connection: sa.Connection, digests: Sequence[bytes]) -> set[bytes]:
    return set(
        connection.scalars(sa.select(payloads.c.digest).where(payloads.c.digest.in_(digests)))
    )


_LOST, _ACCEPTED = "lost commits", "accept losses"


def record_losses(database: Database, author: Author) -> None:
    """Enters what the witness knows and the database does not."""
    if (gone := database.lost()) is None:
        return
    last, seen = gone
    database.write(
        lambda c: audit.append(c, audit.row(author, _LOST, details={"last": last, "seen": seen}))
    )
    database.forget_lost()


def accept_losses(connection: sa.Connection, author: Author) -> None:
    """What was lost so far is not reported any more."""
    audit.append(connection, audit.row(author, _ACCEPTED))


def lost_commits(connection: sa.Connection) -> list[str]:
    """What is lost and not accepted, in words."""
    lost: list[str] = []
    query = (
        sa.select(log)
        .where(log.c.action.in_([_LOST, _ACCEPTED]), log.c.policy_id.is_(None))
        .order_by(log.c.id)
    )
    for row in connection.execute(query):
        if row.action == _ACCEPTED:
            lost = []
        else:
            found = audit.details(row)
            lost.append(
                f"entries {found['last'] + 1} to {found['seen']} of the audit log were committed"
                " and are gone: the database's log was damaged, or an older copy was put in its"
                " place; restore a backup, or make again what is missing, then gc --accept-losses"
            )
    return lost
