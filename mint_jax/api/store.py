"""Catalog access by name, for the Python API."""

import dataclasses
from pathlib import Path

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.errors import UserError
from mint_jax.harness.adapters import JobCatalog


@dataclasses.dataclass(frozen=True, repr=False)
class Stored:
    """A revision in a catalog, fixed when its name was looked up; ``name`` is ``policy@number``."""

    store: JobCatalog
    name: str
    digest: str

    def __repr__(self) -> str:
        return f"Stored({self.name!r}, {self.digest[:12]}, in {self.store.place!r})"


class Store:
    """An open catalog, a context manager.

    ``store["adder@latest"]`` finds a revision by ``policy@alias``, ``policy@number`` or digest.
    ``store.catalog`` does everything else: promote, roll back, list, tag, retire.
    """

    def __init__(self, place: JobCatalog):
        self._place: JobCatalog | None = place
        self._name = place.place

    def __repr__(self) -> str:
        return f"Store({self._name!r}{'' if self._place else ', closed'})"

    @property
    def place(self) -> JobCatalog:
        """The catalog in the form that jobs use; raises ``UserError`` if the store is closed."""
        if self._place is None:
            raise UserError(f"the catalog {self._name} was closed: open it again with mint.open")
        return self._place

    @property
    def catalog(self) -> Catalog:
        """The catalog itself."""
        return self.place.main

    def __getitem__(self, name: str) -> Stored:
        """Returns the revision that a name resolves to now; refuses an unknown name."""
        if not isinstance(name, str):
            raise UserError(
                f"revision is {name!r}; expected a name, 'policy@latest', 'policy@3' or a digest"
            )
        found = self.catalog.resolve(name)
        return Stored(self.place, f"{found.policy}@{found.number}", found.digest)

    def close(self) -> None:
        """Closes the database connections."""
        if self._place is not None:
            self._place.close()
            self._place = None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(place: str | Path, payloads: str = "", create: bool = False) -> Store:
    """Opens a catalog.

    Args:
        place: the catalog's folder, or its database's URL.
        payloads: folder, ``s3://`` or ``gs://`` address of the payloads; required with a URL.
        create: makes the catalog if it does not exist.

    Raises:
        UserError: the catalog does not exist or cannot be opened.
    """
    if not isinstance(place, str | Path) or not str(place):
        raise UserError(f"place is {place!r}; expected a catalog's folder or its database's URL")
    text = str(Path(place).expanduser()) if "://" not in str(place) else str(place)
    _, is_sqlite, file = text.partition("sqlite:///")
    there = Path(file) if is_sqlite else Path(text) / "catalog.db"
    if not create and (is_sqlite or "://" not in text) and not there.is_file():
        raise UserError(
            f"there is no catalog in {text}: check the path, or make a new one with"
            f" mint.open({text!r}, create=True)"
        )
    return Store(JobCatalog(text, payloads, create=True))
