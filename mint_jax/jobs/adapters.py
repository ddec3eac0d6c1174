"""Adapters named in configs and data files: a PEFT directory, or a revision of the catalog."""

import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.catalog.records import names as catalog_names
from mint_jax.catalog.records.leases import Lease
from mint_jax.errors import UserError
from mint_jax.jobs.catalogs import JobCatalog, Named
from mint_jax.jobs.common import say
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.outline import peft_tables
from mint_jax.residency.opening import Known
from mint_jax.residency.pool import AdapterEntry, Pool

# payloads of later turns are kept from collection so long, and anew while turns go on
LEASE_S = 86400.0


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An adapter on the host.

    Attributes:
        digest: of its packed object, also where it came from a PEFT directory.
        revision: the catalog's name of it; None for a PEFT directory.
    """

    adapter: Any
    config: AdapterConfig
    digest: str
    revision: Named | None = None


def read_adapter(name: str | Path, base: Base, catalog: JobCatalog | None = None) -> Loaded:
    """An adapter, checked against the base.

    Args:
        name: a PEFT directory, or ``policy``, ``policy@alias``, ``policy@12``, a digest, each of
            ``catalog``.

    Raises:
        UserError: nothing there, unreadable or corrupt, or made for another base.
    """
    text = str(name)
    if is_directory(text):
        loaded, bound = _read_directory(text, base)
    else:
        data, revision = need_catalog(text, catalog).load(text)
        adapter, schema = unpack(data)
        check_base(schema, str(revision), base)
        loaded = Loaded(adapter, schema.config, revision.digest, revision)
        # its numbers were looked at when the catalog took it in, or are now
        bound = lora_tree.check_fits(
            adapter, schema.config, transformer.abstract(base.cfg), text, finite=not revision.finite
        )
    say(f"adapter {text}: rank {loaded.config.rank}, {bound} modules bound")
    return loaded


def _read_directory(text: str, base: Base) -> tuple[Loaded, int]:
    """A PEFT directory's adapter, and how many modules it binds."""
    names, shapes = peft_tables(base.cfg)
    adapter, config = peft.read_peft(Path(text), names, shapes)
    # reading it looked at its numbers
    bound = lora_tree.check_fits(
        adapter, config, transformer.abstract(base.cfg), text, finite=False
    )
    return (
        Loaded(adapter, config, digest_of(pack(adapter, Schema(base.fingerprint, config)))),
        bound,
    )


def is_directory(text: str) -> bool:
    """Whether it is a PEFT directory's path rather than a revision's name."""
    only_a_name = not text.startswith(("/", ".")) and ("@" in text or catalog_names.is_digest(text))
    return not only_a_name and peft.is_peft(Path(text))


def need_catalog(text: str, catalog: JobCatalog | None) -> JobCatalog:
    """The catalog to look an adapter up in.

    Raises:
        UserError: the config names none.
    """
    if catalog is None:
        raise UserError(
            f"adapter {text} is no PEFT directory ({peft.CONFIG}), and no catalog is given to look"
            " it up in: check the path, or set --config.catalog"
        )
    return catalog


def check_base(schema: Schema, revision: str, base: Base) -> None:
    """Refuses a revision that was trained on another base."""
    if schema.base != base.fingerprint:
        raise UserError(
            f"revision {revision} was trained on base {schema.base[:12]}, this is"
            f" {base.fingerprint[:12]} ({base.name}): load its own base"
        )


class AdapterSource:
    """What names in configs and data files stand for, for a ``Pool``: PEFT directories, and
    revisions of the catalog.

    Revisions are leased from ``look_up`` until ``release``: what the names stood for stays,
    whatever becomes of the names.

    Attributes:
        revisions: by name, of those that are the catalog's.
    """

    unpack = staticmethod(unpack)

    def __init__(self, base: Base, catalog: JobCatalog | None):
        self.base, self._catalog = base, catalog
        self.revisions: dict[str, Named] = {}
        self._given: dict[str, np.ndarray] = {}  # packed objects that come from PEFT directories
        self._leases: dict[str, Lease] = {}

    def look_up(self, names: Sequence[str]) -> dict[str, AdapterEntry]:
        found: dict[str, AdapterEntry] = {}
        named = []
        for name in names:
            if is_directory(name):
                loaded, _ = _read_directory(name, self.base)
                data = np.frombuffer(
                    pack(loaded.adapter, Schema(self.base.fingerprint, loaded.config)), np.uint8
                )
                self._given[loaded.digest] = data
                found[name] = AdapterEntry(
                    loaded.digest, Known(loaded.config, "float32", True), data.nbytes
                )
            else:
                need_catalog(name, self._catalog)
                named.append(name)
        if named:
            for name, (*which, text, nbytes) in zip(
                named, multihost.agree("revisions", lambda: self._resolve(named))
            ):
                schema, revision = Schema.from_json(text), Named(*which)
                check_base(schema, str(revision), self.base)
                self.revisions[name] = revision
                found[name] = AdapterEntry(
                    revision.digest, Known(schema.config, schema.dtype, revision.finite), nbytes
                )
            if multihost.count() == 1:  # several processes load all before they begin
                digests, owner = (
                    sorted({found[name].digest for name in named}),
                    f"turns of process {os.getpid()}",
                )
                self._leases = dict(zip(digests, self._main.lease_many(digests, owner, LEASE_S)))
        return {name: found[name] for name in names}

    @property
    def _main(self) -> Catalog:
        assert self._catalog is not None
        return self._catalog.main

    def _resolve(self, named: Sequence[str]) -> list[list[Any]]:
        return [
            [one.policy, one.number, one.digest, one.finite, one.schema, one.place.length]
            for one in self._main.resolve_many(named)
        ]

    def fetch(self, digest: str) -> np.ndarray:
        if digest in self._given:
            return self._given[digest]
        return self._main.read_leased(self._leases[digest], verified=False)  # residency does

    def load(self, name: str) -> tuple[AdapterConfig, Any]:
        loaded = read_adapter(
            self.revisions[name].digest if name in self.revisions else name,
            self.base,
            self._catalog,
        )
        return loaded.config, loaded.adapter

    def renew(self) -> None:
        for digest, lease in self._leases.items():
            if lease.expires_at < time.time() + LEASE_S / 2:
                self._leases[digest] = self._main.renew_lease(lease, LEASE_S)

    def release(self, digests: Iterable[str]) -> None:
        held = [self._leases.pop(digest) for digest in list(digests) if digest in self._leases]
        if held:
            self._main.release(*held)


def pool_of(
    base: Base, names: Sequence[str | None], catalog: JobCatalog | None, slots: int
) -> Pool:
    """A pool of the adapters that a config or the rows of a file name; see ``Pool``."""
    return Pool(base, AdapterSource(base, catalog), names, slots, say)
