"""What keeps a catalog in order, beside its daily work: verification, garbage collection,
compaction, recovery, counts.
"""

import itertools
from collections.abc import Callable, Iterator

import sqlalchemy as sa

from mint_jax.catalog.records.exports import Exports
from mint_jax.catalog.records.policies import DELETED
from mint_jax.catalog.records.tables import metadata, packs, payloads, policies, revisions
from mint_jax.catalog.upkeep import collection, recovery, verify


class Upkeep(Exports):
    """Looks for damage, and removes what nothing names."""

    def verify(
        self, name: str | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[verify.Finding]:
        """What is damaged: in one revision, or anywhere. Nothing is changed.

        Args:
            progress: called with payloads and bytes checked so far, where everything is checked.
        """
        if name is None:
            return verify.verify_all(self.database, self.store, progress)
        return verify.verify_one(self.database, self.store, self.resolve(name))

    def gc(
        self,
        *,
        dry_run: bool = False,
        compact: bool = True,
        grace_s: float = 3600.0,
        operations_s: float = 30 * 86400.0,
        accept_losses: bool = False,
        by: str | None = None,
        why: str = "",
        progress: collection.OnProgress | None = None,
    ) -> collection.Report:
        """Removes what retention gives up and nothing names, and says what it was.

        Args:
            dry_run: only say.
            compact: join small and mostly dead packs too.
            grace_s: how long a pack's file stays after its last payload went, and how long a writer
                may take to write and commit; shorten it only while no process writes.
            operations_s: how long ended operations are kept.
            accept_losses: collect also where the database has lost commits, whose payloads nothing
                names any more.
            progress: called with what is looked at, how many so far, and of how many.

        Raises:
            UserError: the database is damaged, or has lost commits.
        """
        author = self._author(by, why)
        if accept_losses and not dry_run:
            self.database.write(lambda c: recovery.accept_losses(c, author))
        report = collection.collect(
            self.database, self.store, author, grace_s, operations_s, dry_run, progress
        )
        if compact:
            collection.compact(self.database, self.store, author, report, progress)
        return report

    def compact(
        self, *, dry_run: bool = False, by: str | None = None, why: str = ""
    ) -> collection.Report:
        """Joins small and mostly dead packs; ``gc`` removes the old files after its grace
        period.
        """
        report = collection.Report(dry_run)
        collection.compact(self.database, self.store, self._author(by, why), report)
        return report

    def recover(
        self,
        template: str = recovery.TEMPLATE,
        *,
        dry_run: bool = False,
        grace_s: float = 3600.0,
        by: str | None = None,
        why: str = "",
        progress: Callable[[int], None] | None = None,
    ) -> recovery.Recovered:
        """Makes revisions of adapters whose payloads are there and that no record names, as after a
        loss of the database.

        Args:
            template: of their policies' names, with ``{digest}``.
            grace_s: how long a writer may take to commit what it has written.
            progress: called with the number of packs looked at.
        """
        report = recovery.Recovered(dry_run)
        found = recovery.find(
            self.database, self.store, template, self._clock() - grace_s, report, progress
        )
        while some := list(itertools.islice(found, recovery.BATCH)):
            if not dry_run:
                self.export_many(some, create=True, by=by, why=why)
        return report

    def stats(self) -> dict[str, int]:
        """Counts and bytes of what the catalog holds: rows of every table, and what the tables show
        only by a query.
        """
        queries = {
            name: sa.select(sa.func.count()).select_from(table)
            for name, table in sorted(metadata.tables.items())
        }
        queries |= {
            "policies": (
                sa.select(sa.func.count()).select_from(policies).where(policies.c.state != DELETED)
            ),
            "retired_policies": sa.select(sa.func.count()).where(policies.c.state == "retired"),
            "retired_revisions": sa.select(sa.func.count()).where(revisions.c.state == "retired"),
            "open_sessions": (
                sa.select(sa.func.count()).where(policies.c.session_owner.is_not(None))
            ),
            "payload_bytes": sa.select(sa.func.sum(payloads.c.length)),
            "pack_bytes": sa.select(sa.func.sum(packs.c.bytes)).where(packs.c.state != "swept"),
            "dead_packs": sa.select(sa.func.count()).where(packs.c.state == "dead"),
        }
        return self.database.read(
            lambda c: {name: int(c.scalar(query) or 0) for name, query in queries.items()}
        )
