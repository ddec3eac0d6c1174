"""The catalog that a job's config names: ``catalog`` (a folder or a database URL) and ``payloads``
(where they are not inside).

Of several processes the first alone has the database; payloads are read by all of them, where the
first says they lie.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.storage.payloads import PackDamaged, PayloadStore, Place
from mint_jax.errors import UserError
from mint_jax.jobs.common import Config


class Named(NamedTuple):
    """What a revision's name stood for when it was looked up."""

    policy: str
    number: int
    digest: str
    finite: bool  # the catalog has looked at all weights

    def __str__(self) -> str:
        return f"{self.policy}@{self.number}"


class JobCatalog:
    """A catalog as all processes of a job see it; all make the same calls in the same order.

    Args:
        place, payloads: see ``Catalog.open``.
        create: make the catalog where there is none.

    Raises:
        UserError: it cannot be opened, or is not there.
    """

    def __init__(self, place: str | Path, payloads: str = "", create: bool = False):
        self.place = str(place)
        self._catalog: Catalog | None = None
        self._store: PayloadStore | None = None
        url = multihost.agree("catalog", lambda: self._open(payloads, create))
        if not multihost.is_main():
            self._store = PayloadStore(url)

    def _open(self, payloads: str, create: bool) -> str:
        if (
            not create
            and "://" not in self.place
            and not (Path(self.place) / "catalog.db").is_file()
        ):
            raise UserError(
                f"catalog {self.place} does not exist: set --config.catalog to a catalog's folder"
                " or its database's URL"
            )
        self._catalog = Catalog.open(self.place, payloads or None)
        return self._catalog.store.url

    @property
    def main(self) -> Catalog:
        """The catalog itself, on process 0."""
        assert self._catalog is not None, "process 0 alone talks to the catalog"
        return self._catalog

    def load(self, name: str) -> tuple[np.ndarray, Named]:
        """The packed object that a name stands for now, verified, on every process.

        Raises:
            UserError: an unknown name, or damaged bytes.
        """

        def resolve() -> list:
            found = self.main.resolve(name)
            return [found.policy, found.number, found.digest, found.finite, found.place]

        policy, number, digest, finite, place = multihost.agree(f"revision {name}", resolve)
        named = Named(policy, number, digest, finite)
        if self._store is None:
            return self.main.load(digest), named
        try:
            return self._store.read(Place(*place), digest), named
        except PackDamaged as error:
            raise UserError(
                f"payload {digest[:12]} is damaged: {error}; export it again, or roll back"
            ) from None

    def close(self) -> None:
        """Closes the database's connections."""
        if self._catalog is not None:
            self._catalog.close()


@contextlib.contextmanager
def reading(config: Config) -> Iterator[JobCatalog | None]:
    """The catalog of a config for as long as the block runs; None where it names none."""
    if not config.catalog:
        yield None
        return
    catalog = JobCatalog(config.catalog, config.payloads)
    with contextlib.closing(catalog):
        yield catalog
