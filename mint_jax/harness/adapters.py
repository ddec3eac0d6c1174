"""Adapters by name, in configs and data files: a PEFT directory, or a revision of the catalog that
the config names. Of several processes the first has the catalog's database, all read payloads.
"""

import contextlib
import dataclasses
import operator
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.catalog.records import names as catalog_names
from mint_jax.catalog.records.leases import Lease
from mint_jax.catalog.storage.payloads import PackDamaged, PayloadStore, Place
from mint_jax.errors import UserError
from mint_jax.harness.options import CatalogSettings, need_catalog
from mint_jax.harness.start import say
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.outline import peft_tables
from mint_jax.residency.pool import AdapterEntry, Known

LEASE_S = 86400.0  # of payloads that wait for their turn; renewed while turns go on


class Named(NamedTuple):
    """The revision of a name at its look-up; ``finite``: the catalog has checked all weights."""

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

        def opened() -> str:
            if not create:
                need_catalog(self.place)
            self._catalog = Catalog.open(self.place, payloads or None)
            return self._catalog.store.url

        url = multihost.agree("catalog", opened)
        if not multihost.is_main():
            self._store = PayloadStore(url)

    @property
    def main(self) -> Catalog:
        """The catalog itself, in the first process."""
        assert self._catalog is not None, "only the first process has the catalog"
        return self._catalog

    def load(self, name: str) -> tuple[np.ndarray, Named]:
        """Returns the packed object of a name, verified; refuses unknown names, damaged bytes."""

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
def catalog_of(config: CatalogSettings) -> Iterator[JobCatalog | None]:
    """Opens the catalog of a config for the block; None where it names none."""
    if not config.catalog:
        yield None
        return
    with contextlib.closing(JobCatalog(config.catalog, config.payloads)) as catalog:
        yield catalog


@dataclasses.dataclass(frozen=True)
class LoadedAdapter:
    """An adapter on the host; ``revision`` is None for a PEFT directory."""

    adapter: Any
    config: AdapterConfig
    digest: str
    revision: Named | None = None


def read_adapter(name: str | Path, base: Base, catalog: JobCatalog | None = None) -> LoadedAdapter:
    """Returns an adapter that fits the base, by the name of a PEFT directory, or ``policy``,
    ``policy@alias``, ``policy@12`` or a digest of ``catalog``. Raises ``UserError`` if it is not
    found, damaged, or of another base.
    """
    text, revision = str(name), None
    if _is_directory(text):
        adapter, config = peft.read_peft(Path(text), *peft_tables(base.cfg))  # checks the numbers
        digest = digest_of(pack(adapter, Schema(base.fingerprint, config)))
    else:
        data, revision = _need(text, catalog).load(text)
        adapter, schema = unpack(data)
        _check_base(schema, revision, base)
        config, digest = schema.config, revision.digest
    is_unchecked = revision is not None and not revision.finite
    specs = transformer.abstract(base.cfg)
    bound = lora_tree.check_fits(adapter, config, specs, text, finite=is_unchecked)
    say(f"adapter {text}: {config.size}, {bound} modules bound")
    return LoadedAdapter(adapter, config, digest, revision)


def _is_directory(text: str) -> bool:
    """Tells a PEFT directory's path from a revision's name."""
    only_a_name = not text.startswith(("/", ".")) and ("@" in text or catalog_names.is_digest(text))
    return not only_a_name and peft.is_peft(Path(text))


def _need(text: str, catalog: JobCatalog | None) -> JobCatalog:
    if catalog is None:
        raise UserError(
            f"adapter {text} is no PEFT directory ({peft.CONFIG}), and no catalog is given to look"
            " it up in: check the path, or set --config.catalog"
        )
    return catalog


def _check_base(schema: Schema, revision: Named, base: Base) -> None:
    if schema.base != base.fingerprint:
        raise UserError(
            f"revision {revision} was trained on base {schema.base[:12]}, this is"
            f" {base.fingerprint[:12]} ({base.name}): load its own base"
        )


class AdapterSource:
    """Adapters by name for a ``Pool``; see ``PoolSource``. The catalog's ``revisions`` are leased
    from ``look_up`` until ``release``, whatever becomes of their names.
    """

    unpack = staticmethod(unpack)

    def __init__(self, base: Base, catalog: JobCatalog | None):
        self.base, self._catalog = base, catalog
        self.revisions: dict[str, Named] = {}
        self._peft: dict[str, np.ndarray] = {}  # packed objects of PEFT directories
        self._leases: dict[str, Lease] = {}

    def look_up(self, names: Sequence[str]) -> dict[str, AdapterEntry]:
        found: dict[str, AdapterEntry] = {}
        for name in filter(_is_directory, names):
            loaded = read_adapter(name, self.base)
            packed = pack(loaded.adapter, Schema(self.base.fingerprint, loaded.config))
            self._peft[loaded.digest] = data = np.frombuffer(packed, np.uint8)
            known = Known(loaded.config, "float32", True)
            found[name] = AdapterEntry(loaded.digest, known, data.nbytes)
        if revisions := [name for name in names if name not in found]:
            found |= self._look_up_revisions(revisions, _need(revisions[0], self._catalog))
        return {name: found[name] for name in names}

    def _look_up_revisions(
        self, names: Sequence[str], catalog: JobCatalog
    ) -> dict[str, AdapterEntry]:
        def resolve() -> list[list[Any]]:
            of_name = operator.attrgetter("policy", "number", "digest", "finite", "schema")
            return [[*of_name(one), one.place.length] for one in catalog.main.resolve_many(names)]

        found = {}
        for name, (*which, text, nbytes) in zip(names, multihost.agree("revisions", resolve)):
            schema, revision = Schema.from_json(text), Named(*which)
            _check_base(schema, revision, self.base)
            self.revisions[name] = revision
            known = Known(schema.config, schema.dtype, revision.finite)
            found[name] = AdapterEntry(revision.digest, known, nbytes)
        if multihost.count() == 1:  # several processes load all adapters before they begin
            digests = sorted({entry.digest for entry in found.values()})
            owner = f"turns of process {os.getpid()}"
            self._leases = dict(zip(digests, catalog.main.lease(digests, owner, LEASE_S)))
        return found

    @property
    def _main(self) -> Catalog:
        assert self._catalog is not None
        return self._catalog.main

    def fetch(self, digest: str) -> np.ndarray:
        if digest in self._peft:
            return self._peft[digest]
        return self._main.load_payload(digest, verified=False)  # residency verifies

    def load(self, name: str) -> tuple[AdapterConfig, Any]:
        exact = self.revisions[name].digest if name in self.revisions else name
        loaded = read_adapter(exact, self.base, self._catalog)
        return loaded.config, loaded.adapter

    def renew(self) -> None:
        for digest, lease in self._leases.items():
            if lease.expires_at < time.time() + LEASE_S / 2:
                self._leases[digest] = self._main.renew_lease(lease, LEASE_S)

    def release(self, digests: Iterable[str]) -> None:
        leases = [self._leases.pop(digest) for digest in list(digests) if digest in self._leases]
        if leases:
            self._main.release(*leases)
