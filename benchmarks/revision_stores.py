"""Revisions in the catalog's packs against one Orbax checkpoint each, in a folder.

Only ``packs`` also verifies a digest. A cold load reopens the store after its files left the page
cache. ``measured`` is the number of revisions in a store.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from benchmarks import timing
from benchmarks.alone import scratch
from benchmarks.bases import shape
from benchmarks.catalog_fill import drop_from_page_cache
from benchmarks.packed_files import adapter_of
from benchmarks.packed_store import BASE, TARGETS
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.catalog.storage.payloads import PayloadStore, Place
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.metrics import Progress
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


def packed_adapters(config: Any, start: int, count: int) -> list[bytes]:
    """Returns ``count`` packed random adapters; ``start`` seeds them."""
    adapter = AdapterConfig(config.shape.rank, 2.0, TARGETS)
    specs = lora_tree.adapter_specs(transformer.abstract(shape(config.shape)), adapter)
    rng = np.random.default_rng([config.seed, start])
    return [pack(adapter_of(specs, rng, "float32"), Schema(BASE, adapter)) for _ in range(count)]


def measure(config: Any, folder: Path, lone: bytes) -> dict[str, Any]:
    """Returns figures of both stores and their ratios to packs."""
    stores = {"packs": Packs(folder / "packs"), "orbax": Orbax(folder / "orbax")}
    sizes = {"packs": config.entries, "orbax": config.others}
    export: dict[str, list[float]] = {name: [] for name in stores}
    load: dict[str, list[float]] = {name: [] for name in stores}
    counts = dict.fromkeys(stores, 0)
    progress = Progress("export", config.n)
    for k in range(config.n):
        for name, store in stores.items():
            count = sizes[name] // config.n
            objects = packed_adapters(config, counts[name] + 1, count)
            export[name].append(_seconds(lambda s=store, o=objects: s.put(o)) / count)
            counts[name] += count
        progress.update(k + 1)
    draw = random.Random(config.seed)
    for _ in range(config.n):
        for name, store in stores.items():
            indices = draw.sample(range(counts[name]), min(config.loads, counts[name]))
            drop_from_page_cache(store.folder)
            store.reopen()
            seconds = _seconds(lambda s=store, i=indices: [s.get(index) for index in i])
            load[name].append(seconds / len(indices))
    out: dict[str, Any] = {}
    for name, store in stores.items():
        files = [path.stat().st_size for path in store.folder.rglob("*") if path.is_file()]
        out[name] = {
            "measured": counts[name],
            "files": len(files),
            "bytes": sum(files),
            "bytes_over_payload": round(sum(files) / (counts[name] * len(lone)), 3),
            "export_ms_each": timing.median(export[name], 1e3),
            "cold_load_ms": timing.median(load[name], 1e3),
        }
    return out | {
        "ratio_export_orbax": timing.ratio(export, "orbax", "packs"),
        "ratio_cold_load_orbax": timing.ratio(load, "orbax", "packs"),
    }


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the benchmark; returns its report and removes its files."""
    if config.n < 5:
        raise UserError(f"n is {config.n}; medians need at least 5")
    [lone] = packed_adapters(config, 0, 1)
    with scratch((workdir / "revision_stores").absolute()) as folder:
        many = measure(config, folder, lone)
    return {"revision_bytes": len(lone), "entries": config.entries, "folder": {"many": many}}
