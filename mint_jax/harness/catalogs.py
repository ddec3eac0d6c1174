"""The catalog that a config names, as all processes of a run use it: the first has the database,
all read payloads.
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
from mint_jax.harness.options import CatalogSettings, need_catalog


class Named(NamedTuple):
    """The revision of a name at the time of its look-up. ``finite``: all its weights were checked
    by the catalog.
    """

    policy: str
    number: int
    digest: str
    finite: bool

    def __str__(self) -> str:
        return f"{self.policy}@{self.number}"


class JobCatalog:
    """A catalog; all processes make the same calls in the same order. See ``Catalog.open``."""

    def __init__(self, place: str | Path, payloads: str = "", create: bool = False):
        self.place = str(place)
        self._catalog: Catalog | None = None
        self._store: PayloadStore | None = None
        url = multihost.agree("catalog", lambda: self._open(payloads, create))
        if not multihost.is_main():
            self._store = PayloadStore(url)

    def _open(self, payloads: str, create: bool) -> str:
        if not create:
            need_catalog(self.place)
        self._catalog = Catalog.open(self.place, payloads or None)
        return self._catalog.store.url

    @property
    def main(self) -> Catalog:
        """The catalog itself, in the first process."""
        assert self._catalog is not None, "only the first process has the catalog"
        return self._catalog

    def load(self, name: str) -> tuple[np.ndarray, Named]:
        """Returns the packed object of a name, verified, in every process.

        Raises:
            UserError: an unknown name, or damaged bytes.
        """

        def resolve() -> list:
            found = self.main.resolve(name)
            return [found.policy, found.number, found.digest, found.finite, found.place]

        *which, place = multihost.agree(f"revision {name}", resolve)
        named = Named(*which)
        if self._store is None:
            return self.main.load(named.digest), named
        try:
            return self._store.read(Place(*place), named.digest), named
        except PackDamaged as error:
            raise UserError(
                f"payload {named.digest[:12]} is damaged: {error}; export it again, or roll back"
            ) from None

    def close(self) -> None:
        """Closes the database's connections."""
        if self._catalog is not None:
            self._catalog.close()


@contextlib.contextmanager
def reading(config: CatalogSettings) -> Iterator[JobCatalog | None]:
    """Opens the catalog of a config for the block; None where it names none."""
    if not config.catalog:
        yield None
        return
    with contextlib.closing(JobCatalog(config.catalog, config.payloads)) as catalog:
        yield catalog
