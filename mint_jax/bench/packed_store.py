"""What the benches of loading share: packed objects in a payload store, and residency over it without a catalog."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax.catalog.packed import digest_of, unpack
from mint_jax.catalog.payloads import PayloadStore, Place
from mint_jax.residency.admission import Admission
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots

BASE = "0" * 64  # fingerprint of the base that is only a shape here
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


class Store:
    """Packed objects in a payload store; counts what is read."""

    def __init__(self, folder: Path | str):
        self.payloads = PayloadStore(str(folder))
        self.places: dict[str, Place] = {}
        self.reads: list[str] = []

    def add(self, objects: Iterable[bytes]) -> list[str]:
        """Each in a pack of its own."""
        digests = []
        for data in objects:
            digests.append(digest_of(data))
            [self.places[digests[-1]]] = self.payloads.put([data])
        return digests

    def fetch(self, digest: str) -> np.ndarray:
        self.reads.append(digest)
        return self.payloads.read(self.places[digest])

    def nbytes(self, digests: Iterable[str]) -> int:
        return sum(self.places[digest].length for digest in digests)


def residency_of(store: Store, specs: Any, rooms: dict[int, int], config: Any, piece: int | None = None, **settings: Any) -> Residency:
    """Residency over a payload store; ``rooms``: slots of each rank bucket; ``piece``: its piece_bytes; ``settings``: of ``Residency``."""
    slots = DeviceSlots(specs, rooms, TARGETS, jnp.dtype(config.dtype), piece_bytes=piece)
    admission = Admission(BASE, specs, {bucket: slots.targets(bucket) for bucket in rooms}, store.places)
    settings = {"workers": config.workers or os.cpu_count() or 1, "niceness": 0} | settings
    return Residency(store.fetch, unpack, admission, slots, 1 << 40, **settings)


def load(residency: Residency, digests: list[str]) -> None:
    """Cold loads of revisions at once; returns when their slots are written, with no lease held."""
    leases = residency.wait_for(digests)
    jax.block_until_ready(residency.stacks)
    for lease in leases:
        lease.release()


def forget(residency: Residency, digests: Iterable[str]) -> None:
    """Drops revisions from slots and host, so that their next load is a cold one."""
    for digest in digests:
        residency.drop(digest)
