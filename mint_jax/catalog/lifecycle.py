"""The catalog: names, revisions, aliases and their history, over a database and a payload store.

    catalog = Catalog.open("runs/catalog")                      # SQLite and payloads in one folder
    catalog = Catalog.open("postgresql://db/mint", "s3://bucket/payloads")
    catalog.create_policy("chat", schema)
    revision = catalog.export("chat", packed, step=100)         # durable and visible when it
    returns catalog.promote("chat", revision.number, "serving", why="best of the sweep")
    catalog.resolve("chat@serving")                             # digest, place, schema

Every change is one transaction with its entry in the audit log. All methods may be called from many
threads, and many processes may open one catalog. Revisions are named as ``names`` says; errors are
``UserError``.
"""

import time
from collections.abc import Callable
from pathlib import Path

from mint_jax.catalog.records.aliases import Aliases
from mint_jax.catalog.records.database import Database
from mint_jax.catalog.records.retention import Retention
from mint_jax.catalog.records.revisions import Revisions
from mint_jax.catalog.records.sessions import Leases, Sessions
from mint_jax.catalog.records.work import Work
from mint_jax.catalog.storage.payloads import PayloadStore
from mint_jax.catalog.upkeep import recovery
from mint_jax.catalog.upkeep.upkeep import Upkeep
from mint_jax.errors import UserError


class Catalog(Revisions, Aliases, Retention, Sessions, Leases, Work, Upkeep):
    """Everything that can be done with a catalog; each class above is one kind of record, in a file
    of its own.
    """

    @classmethod
    def open(
        cls,
        place: str | Path,
        payloads: str | Path | None = None,
        *,
        actor: str | None = None,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> "Catalog":
        """Opens a catalog, making it where there is none.

        Args:
            place: a folder, which holds ``catalog.db`` and ``payloads/``; or a database URL.
            payloads: URL or folder of the payloads; required with a database URL.
            actor: who makes the changes, where a method's ``by`` says nothing.
            timeout_s: how long a locked or lost database is waited for.
            clock: seconds since 1970.

        Raises:
            UserError: the database or the folder cannot be used, or is of a newer version.
        """
        if "://" in str(place):
            if payloads is None:
                raise UserError(
                    f"database {str(place).split('@')[-1]!r} needs a place for the payloads too: a"
                    " folder, s3://… or gs://…"
                )
            url = str(place)
        else:
            folder = Path(place).absolute()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"catalog folder {folder} cannot be made ({error.strerror}): choose a writable"
                    " place"
                ) from None
            url = "sqlite:///" + str(folder / "catalog.db")
            payloads = folder / "payloads" if payloads is None else payloads
        database = Database(url, timeout_s)
        try:
            catalog = cls(database, PayloadStore(str(payloads)), actor, clock)
            recovery.record_losses(database, catalog._author(why="found on opening"))
            return catalog
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        """Closes the database's connections."""
        self.database.close()

    def __enter__(self) -> "Catalog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
