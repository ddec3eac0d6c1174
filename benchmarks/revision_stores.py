"""Revisions in the catalog's packs against one Orbax checkpoint each, in a folder.

Only ``packs`` also verifies a digest. A cold load reopens the store after its files left the page
cache. ``measured`` is the number of revisions in a store.
"""

import functools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from benchmarks import timing
from benchmarks.alone import scratch
from benchmarks.bases import shape
from benchmarks.catalog_fill import drop_from_page_cache
from benchmarks.packed_store import TARGETS, random_objects
from mint_jax.catalog.packed import Schema, digest_of, unpack
from mint_jax.catalog.storage.payloads import PayloadStore, Place
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer

BATCH = 1000  # revisions of a pack


class Packs:
    """The catalog's own store, as an import of many revisions writes it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._places: list[tuple[str, Place]] = []
        self.reopen()

    def put(self, objects: Sequence[bytes]) -> None:
        for start in range(0, len(objects), BATCH):
            batch = objects[start : start + BATCH]
            digests = [digest_of(data) for data in batch]
            self._places += zip(digests, self._store.put(batch), strict=True)

    def get(self, index: int) -> tuple[Any, Schema]:
        digest, place = self._places[index]
        return unpack(self._store.read(place, digest))

    def reopen(self) -> None:
        self._store = PayloadStore(str(self.folder))


class Orbax:
    """A checkpoint per revision with the items of ``export --format=orbax``."""

    def __init__(self, folder: Path):
        self.folder, self._count = folder, 0
        self.reopen()

    def put(self, objects: Sequence[bytes]) -> None:
        for data in objects:
            adapter, schema = unpack(data)
            items = ocp.args.Composite(
                adapter=ocp.args.StandardSave(adapter),
                revision=ocp.args.JsonSave(json.loads(schema.to_json())),
            )
            self._checkpointer.save(self.folder / str(self._count), items)
            self._count += 1

    def get(self, index: int) -> tuple[Any, Schema]:
        items = ocp.args.Composite(
            adapter=ocp.args.StandardRestore(), revision=ocp.args.JsonRestore()
        )
        found = self._checkpointer.restore(self.folder / str(index), items)
        return found["adapter"], Schema.from_json(json.dumps(found["revision"]))

    def reopen(self) -> None:
        self._checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def measure(config: Any, folder: Path, adapters: Callable[[int], list[bytes]]) -> dict[str, Any]:
    """Returns figures of both stores and their ratios to packs; ``adapters`` makes packed ones."""
    stores = {"packs": Packs(folder / "packs"), "orbax": Orbax(folder / "orbax")}
    counts = {"packs": config.entries // config.n, "orbax": config.others // config.n}  # of a round
    draw = random.Random(config.seed)

    def export(name: str) -> float:
        objects = adapters(counts[name])
        return timing.seconds_of(lambda: stores[name].put(objects)) / len(objects)

    def load(name: str) -> float:
        store, stored = stores[name], counts[name] * config.n
        indices = draw.sample(range(stored), min(config.loads, stored))
        drop_from_page_cache(store.folder)
        store.reopen()
        return timing.seconds_of(lambda: [store.get(index) for index in indices]) / len(indices)

    exports, loads = (
        timing.collect(what.__name__, {n: functools.partial(what, n) for n in stores}, config.n, 0)
        for what in (export, load)
    )
    [lone], out = adapters(1), {}
    for name, store in stores.items():
        files = [path.stat().st_size for path in store.folder.rglob("*") if path.is_file()]
        out[name] = {
            "measured": (stored := counts[name] * config.n),
            "files": len(files),
            "bytes": sum(files),
            "bytes_over_payload": round(sum(files) / (stored * len(lone)), 3),
            "export_ms_each": timing.median(exports[name], 1e3),
            "cold_load_ms": timing.median(loads[name], 1e3),
        }
    ratios = {"ratio_export_orbax": exports, "ratio_cold_load_orbax": loads}
    ratios = {name: timing.ratio(times, "orbax", "packs") for name, times in ratios.items()}
    report = {"revision_bytes": len(lone), "entries": config.entries}
    return report | {"folder": {"many": out | ratios}}


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the benchmark; returns its report and removes its files."""
    if config.n < 5:
        raise UserError(f"n is {config.n}; medians need at least 5")
    adapter, rng = (
        AdapterConfig(config.shape.rank, 2.0, TARGETS),
        np.random.default_rng(config.seed),
    )
    specs = transformer.abstract(shape(config.shape))
    with scratch((workdir / "revision_stores").absolute()) as folder:
        return measure(config, folder, lambda n: list(random_objects(specs, adapter, rng, n)))
