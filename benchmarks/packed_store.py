"""A catalog of packed adapters and residency over it, shared by the load benchmarks."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.records.leases import Lease
from mint_jax.catalog.records.lookup import Resolved
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.residency.pool import Known, open_residency
from mint_jax.residency.residency import Residency

BASE = "0" * 64  # fingerprint of the base that is only a shape here
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
LEASE_S = 86400.0


def random_objects(
    specs: Any, adapter: AdapterConfig, rng: np.random.Generator, count: int, dtype: str = "float32"
) -> Iterator[bytes]:
    """Yields packed random adapters of a base's abstract parameters."""
    wanted = lora_tree.adapter_specs(specs, adapter)
    for _ in range(count):
        yield pack(adapter_of(wanted, rng, dtype), Schema(BASE, adapter, dtype))


def adapter_of(wanted: Any, rng: np.random.Generator, dtype: str) -> Any:
    """A random adapter of these specs."""
    return jax.tree.map(
        lambda spec: rng.standard_normal(spec.shape, np.float32).astype(jnp.dtype(dtype)), wanted
    )


class Store:
    """Revisions of a catalog in a folder, with their records by digest; counts reads."""

    def __init__(self, folder: Path | str):
        self.folder = str(folder)
        self.catalog = Catalog.open(self.folder)
        self.found: dict[str, Resolved] = {}
        self.reads: list[str] = []
        self._leases: dict[str, Lease] = {}

    def add(self, objects: Iterable[bytes]) -> list[str]:
        """Exports packed adapters, each as a policy and in a pack of its own; their digests."""
        made = []
        for k, data in enumerate(objects):
            one = Export(f"p{len(self.found) + k}", data, 1)
            made += self.catalog.export_many([one], create=True)
        return self.lease(revision.digest for revision in made)

    def lease(self, digests: Iterable[str]) -> list[str]:
        """Resolves and leases revisions, as a job does before it loads them."""
        digests = list(digests)
        self.found |= dict(zip(digests, self.catalog.resolve_many(digests)))
        self._leases |= dict(zip(digests, self.catalog.lease(digests, "bench", LEASE_S)))
        return digests

    def fetch(self, digest: str) -> np.ndarray:
        self.reads.append(digest)
        return self.catalog.load_payload(digest, verified=False)

    def nbytes(self, digests: Iterable[str]) -> int:
        return sum(self.found[digest].place.length for digest in digests)

    def known(self) -> dict[str, Known]:
        """Returns the records of all revisions, with which residency is opened."""
        out = {}
        for digest, found in self.found.items():
            schema = Schema.from_json(found.schema)
            out[digest] = Known(schema.config, schema.dtype, found.finite)
        return out


def residency_of(store: Store, specs: Any, slots: int, depth: int = 256) -> Residency:
    """Residency over a store, with ``slots`` slots a bucket and all of the host's memory, and
    otherwise the settings of jobs.
    """
    return open_residency(
        store.fetch, unpack, BASE, specs, store.known(), slots, 1 << 40, depth=depth
    )


def load(residency: Residency, digests: list[str]) -> None:
    """Cold loads of revisions at once; returns when their slots are written, with no lease held."""
    leases = residency.wait_for(digests)
    jax.block_until_ready(residency.stacks)
    for lease in leases:
        lease.release()


def forget(residency: Residency, digests: Collection[str]) -> None:
    """Removes revisions without leases from slots and host, so that their next load is cold."""
    for tier in (residency.host, *residency.device.values()):
        for digest in set(digests) & set(tier.copies):
            tier._remove(digest)
