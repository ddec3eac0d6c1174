"""A catalog of 10^3 to 10^6 revisions: its making, names, cold loads and memory.

Each size is filled in one process and measured in another. ``resolve``: ``policy@latest`` for names
of each kind of ``traffic``, and ``policy@number``. ``load``: from a Zipf name to a device slot
through a small ``Residency``, by the tier that had the bytes; ``loads`` has all kinds of traffic,
``disk`` cold loads after files left the page cache. ``promote``: moves of one alias by a revision.
``errors``: requests that raised or returned another revision.
"""

import contextlib
import json
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from benchmarks import timing, traffic
from benchmarks.alone import alone, scratch
from benchmarks.catalog_fill import (
    BASE,
    DTYPE,
    FORMS,
    Form,
    Payloads,
    Plan,
    drop_from_page_cache,
    fill,
    on_disk,
    open_catalog,
)
from benchmarks.packed_store import forget
from benchmarks.postgres_server import PostgresServer
from mint_jax import host
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of, unpack
from mint_jax.catalog.storage.payloads import Place
from mint_jax.errors import UserError, choice
from mint_jax.residency.admission import Admission
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots

DATABASES = ("sqlite", "postgres")
_RESOLVE = ("p50_ms", "p99_ms")


def resolves(
    catalog: Catalog, what: str, names: Iterator[tuple[str, int]], count: int
) -> dict[str, Any]:
    """Resolves names, each with its revision number, one after the other."""
    seconds, errors = array("d"), 0
    for name, number in timing.counted(what, names, count):
        began = time.perf_counter()
        try:
            errors += catalog.resolve(name).number != number
        except UserError:
            errors += 1
        seconds.append(time.perf_counter() - began)
    return {**timing.percentiles(seconds), "errors": int(errors)}


class Loads:
    """The way from a name to a device slot."""

    def __init__(self, catalog: Catalog, form: Form, config: Any, object_bytes: int):
        specs, bucket = form.specs, form.adapter.bucket
        slots = DeviceSlots(specs, {bucket: config.slots}, form.adapter.targets, jnp.dtype(DTYPE))
        admission = Admission(BASE, specs, {bucket: slots.targets(bucket)})
        self._catalog = catalog
        self._places: dict[str, Place] = {}  # of the request under way
        self._loaded: set[str] = set()
        loading = (self._fetch, unpack, admission, slots, config.host_entries * object_bytes)
        self.residency = Residency(*loading, workers=os.cpu_count() or 1, niceness=0)

    def _fetch(self, digest: str) -> np.ndarray:
        return self._catalog.store.read(self._places[digest])  # verified by residency

    def empty(self) -> None:
        """Drops all adapters from slots and host cache."""
        forget(self.residency, self._loaded)
        self._loaded.clear()

    def load(self, name: str, drop: bool = False) -> tuple[str, float]:
        """Returns the tier that had a name's adapter, and the seconds from the request to the
        written slot.

        Args:
            drop: the adapter is dropped everywhere afterwards and found cold the next time.
        """
        began = time.perf_counter()
        resolved = self._catalog.resolve(name)
        digest = resolved.digest
        self._places = {digest: resolved.place}
        self._loaded.add(digest)
        tier = "host" if digest in self.residency.host else "cold"
        future = self.residency.acquire(digest)
        if future.done():
            tier = "device"
        [lease] = [future.result()] if future.done() else self.residency.wait_for([digest])
        jax.block_until_ready(self.residency.stacks[lease.slot.bucket])
        seconds = time.perf_counter() - began
        lease.release()
        if tier != "device":
            future.result().release()
        if drop:
            forget(self.residency, [digest])
        return tier, seconds

    def measure(
        self, what: str, names: Iterator[tuple[str, int]], count: int, drop: bool = False
    ) -> dict[str, Any]:
        """Loads one name after the other; see ``load``."""
        found: dict[str, list[float]] = {"device": [], "host": [], "cold": []}
        errors = 0
        for name, _ in timing.counted(what, names, count):
            try:
                tier, seconds = self.load(name, drop)
                found[tier].append(seconds)
            except UserError:
                errors += 1
        loads = len(found["host"]) + len(found["cold"])
        return {
            "requests": count,
            "device_hit_rate": round(len(found["device"]) / count, 4),
            "host_hit_rate": round(len(found["host"]) / loads, 4) if loads else None,
            "cold_rate": round(len(found["cold"]) / count, 4),
            **{tier: timing.percentiles(seconds) for tier, seconds in found.items()},
            "errors": errors,
        }


def measure(
    fields: dict[str, Any], folder: str, entries: int, database: str | None = None
) -> dict[str, Any]:
    """All requests to one catalog; for a fresh process."""
    config: Any = ConfigDict(fields)
    plan = Plan(entries, config.per_policy, config.batch, config.seed, config.form)
    rng, form = np.random.default_rng(config.seed + 1), FORMS[config.form]
    payloads = Payloads(plan.seed, form)

    def latest(kind: str, count: int) -> Iterator[tuple[str, int]]:
        drawn = traffic.draws(kind, plan.policies, count, config.zipf, rng).tolist()
        return ((f"{plan.policy(p)}@latest", plan.newest(p)) for p in drawn)

    with open_catalog(Path(folder), database, actor="reader") as catalog:
        catalog.resolve(plan.policy(0))  # compiles the statements
        before, requests = host.rss_bytes(), config.requests
        numbers = ((k, k // plan.policies + 1) for k in rng.integers(0, entries, requests).tolist())
        asked = {kind: latest(kind, requests) for kind in config.traffic}
        asked["numbers"] = ((f"{plan.policy(k)}@{number}", number) for k, number in numbers)
        resolve = {
            kind: resolves(catalog, f"{entries}: {kind} names", names, requests)
            for kind, names in asked.items()
        }
        after_resolves = host.rss_bytes()
        wrong = _read_back(catalog, plan, payloads, rng)
        loads = Loads(catalog, form, config, payloads.nbytes)
        loads.measure(
            "warm-up", latest("uniform", config.slots), config.slots
        )  # compiles the write
        found = {}
        for kind in config.traffic:
            loads.empty()
            names = latest(kind, config.loads)
            found[kind] = loads.measure(f"{entries}: {kind} loads", names, config.loads)
        load = found["zipf" if "zipf" in found else config.traffic[0]]
        loads.empty()
        drop_from_page_cache(Path(folder))
        uniform = latest("uniform", config.disk_loads)
        disk = loads.measure(f"{entries}: loads from disk", uniform, config.disk_loads, drop=True)
        loads.residency.close()
        rss = host.rss_bytes()
        moved = rng.permutation(plan.policies)[: config.promotions].tolist()
        # an alias of each moves to its newest revision: one transaction each
        promotions = [
            timing.seconds_of(lambda p=p: catalog.promote(plan.policy(p), plan.newest(p)))
            for p in moved
        ]
    parts = [*resolve.values(), *found.values(), disk]
    return {
        "requests": len(asked) * requests,
        "resolve": resolve,
        **{
            f"resolve_{key}": max((one[key] for one in resolve.values()), key=timing.value)
            for key in _RESOLVE
        },
        "load": load,
        "loads": found,
        "promote": timing.percentiles(promotions),
        "disk": disk["cold"],
        "cold_p50_ms": load["cold"].get("p50_ms"),
        "cold_p99_ms": load["cold"].get("p99_ms"),
        "host_hit_rate": load["host_hit_rate"],
        "rss_bytes": rss,
        "rss_grown_by_resolves": after_resolves - before,
        "rss_after_resolves": after_resolves,
        "errors": sum(one["errors"] for one in parts) + wrong,
    }


def _read_back(catalog: Catalog, plan: Plan, payloads: Payloads, rng: np.random.Generator) -> int:
    """Counts revisions of two random batches that differ from what was exported."""
    batches, wrong = list(plan.batches()), 0
    for number in rng.integers(0, len(batches), 2).tolist():
        batch = batches[number]
        expected = [digest_of(data) for data in payloads.batch(number, len(batch))]
        found = catalog.resolve_many([f"{plan.policy(k)}@{k // plan.policies + 1}" for k in batch])
        data = catalog.store.read_many(resolved.place for resolved in found)
        for resolved, buffer, digest in zip(found, data, expected, strict=True):
            wrong += (resolved.digest != digest) + (digest_of(buffer) != digest)
    return wrong


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. The catalogs it makes are removed."""
    rows: list[dict[str, Any]] = []
    for entries in config.entries:
        began, load_before = time.perf_counter(), os.getloadavg()[0]
        plan = Plan(entries, config.per_policy, config.batch, config.seed, config.form)
        made = scratch(workdir / "catalog_scale")
        with made as folder, _server(config.database) as (database, data):
            row = alone(fill, folder, plan, database)
            row |= alone(measure, config.to_dict(), str(folder), entries, database)
            if data is not None:
                row |= {name: row[name] + more for name, more in on_disk(data).items()}
        row |= {"load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)]}
        row["whole_s"] = round(time.perf_counter() - began, 1)
        rows = sorted([*rows, row], key=lambda row: row["entries"])
        # what is measured stays, whatever comes
        (workdir / "catalog_scale.json").write_text(json.dumps(rows, indent=1))
    top = ("entries", "requests", *(f"resolve_{key}" for key in _RESOLVE), "cold_p50_ms")
    top += ("cold_p99_ms", "bytes", "files", "rss_bytes", "entries_per_s")
    return {key: rows[-1][key] for key in top} | {
        "cores": os.cpu_count(),
        "rss_over_smallest": rows[-1]["rss_after_resolves"] - rows[0]["rss_after_resolves"],
        "errors": sum(row["errors"] for row in rows),
        "sizes": rows,
    }


@contextlib.contextmanager
def _server(database: str) -> Iterator[tuple[str | None, Path | None]]:
    """The URL of an empty database and the folder of its files; None for SQLite, which lies in the
    catalog's folder.
    """
    if database not in DATABASES:
        raise choice("database", database, DATABASES)
    if database == "sqlite":
        yield None, None
        return
    try:
        server = PostgresServer()
    except RuntimeError as error:
        raise UserError(f"database is postgres: {error}") from None
    try:
        yield server.url, server.data
    finally:
        server.stop()
