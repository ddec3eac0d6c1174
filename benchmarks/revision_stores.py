"""Where revisions lie: in packs, as the catalog keeps them, or each in an Orbax checkpoint, or in
TensorStore's zarr3 or OCDBT.

All stores get the same adapters, and a load ends with the same tree of arrays and the schema on the
host. ``packs`` verifies the digest of what it read, which no other side does.

- ``packs``: ``PayloadStore``, 1,000 revisions a pack, as an import or an export of many writes
  them.
- ``orbax``: a checkpoint per revision with the items of ``export --format=orbax``, by one
  ``Checkpointer`` for all of them.
- ``zarr3``: TensorStore, an array per factor, 64 revisions under way at once; several files appear
  one by one, so a killed writer leaves half a revision.
- ``ocdbt``: the same arrays in one OCDBT database, a transaction per 64 revisions.

``one``: export and cold load of a single revision in an empty place. ``many``: ``entries`` of them;
export is seconds a revision, over ``n`` batches. ``measured`` is how many revisions a store really
held: packs all of them, the others fewer where the config says so, and nothing is extrapolated.
Cold: the store is opened anew, and in a folder its files are dropped from the page cache
(``posix_fadvise``; blocks that the kernel keeps all the same are warm for every side).
"""

import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from benchmarks import s3_server, timing
from benchmarks.packed_store import BASE, TARGETS
from mint_jax import nested
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.catalog.storage.payloads import PayloadStore, Place
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.metrics import Progress
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig

BATCH = 1000  # revisions of a pack
UNDER_WAY = 64  # revisions that TensorStore writes at once


class Store(Protocol):
    """One way to keep revisions, in a folder or a bucket."""

    def put(self, objects: Sequence[bytes]) -> None: ...
    def get(self, index: int) -> tuple[Any, Schema]: ...
    def reopen(self) -> None: ...


class Packs:
    """The catalog's own."""

    def __init__(self, url: str):
        self._url = url
        self._where: list[tuple[str, Place]] = []
        self.reopen()

    def put(self, objects: Sequence[bytes]) -> None:
        for start in range(0, len(objects), BATCH):
            some = objects[start : start + BATCH]
            digests = [digest_of(data) for data in some]
            self._where += zip(digests, self._store.put(some), strict=True)

    def get(self, index: int) -> tuple[Any, Schema]:
        digest, place = self._where[index]
        return unpack(self._store.read(place, digest))

    def reopen(self) -> None:
        self._store = PayloadStore(self._url)


class Orbax:
    """A checkpoint per revision."""

    def __init__(self, url: str):
        self._url, self._count = url, 0
        self.reopen()

    def put(self, objects: Sequence[bytes]) -> None:
        for data in objects:
            adapter, schema = unpack(data)
            items = ocp.args.Composite(
                adapter=ocp.args.StandardSave(adapter),
                revision=ocp.args.JsonSave(json.loads(schema.to_json())),
            )
            self._checkpointer.save(f"{self._url}/{self._count}", items)
            self._count += 1

    def get(self, index: int) -> tuple[Any, Schema]:
        items = ocp.args.Composite(
            adapter=ocp.args.StandardRestore(), revision=ocp.args.JsonRestore()
        )
        found = self._checkpointer.restore(f"{self._url}/{index}", items)
        return found["adapter"], Schema.from_json(json.dumps(found["revision"]))

    def reopen(self) -> None:
        self._checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())


class Zarr3:
    """An array per factor under ``<revision>/``; in OCDBT or as files."""

    def __init__(self, url: str, ocdbt: bool):
        self._ocdbt, self._count, self._paths = ocdbt, 0, list[str]()
        self._kvstore: dict[str, Any] = {"driver": "file", "path": f"{url}/"}
        if url.startswith("s3://"):
            bucket, _, path = url.removeprefix("s3://").partition("/")
            endpoint = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_region": "us-east-1"}
            self._kvstore = {"driver": "s3", "bucket": bucket, "path": f"{path}/", **endpoint}
        if ocdbt:
            self._kvstore = {"driver": "ocdbt", "base": self._kvstore}
        self.reopen()

    def put(self, objects: Sequence[bytes]) -> None:
        for start in range(0, len(objects), UNDER_WAY):
            some = [unpack(data) for data in objects[start : start + UNDER_WAY]]
            flat = [dict(nested.leaves_with_path(adapter)) for adapter, _ in some]
            self._paths = list(flat[0])
            with ts.Transaction() if self._ocdbt else contextlib.nullcontext() as transaction:
                opened = [
                    (self._open(self._count + i, path, leaf, transaction), leaf)
                    for i, one in enumerate(flat)
                    for path, leaf in one.items()
                ]
                writes = [array.result().write(leaf) for array, leaf in opened]
                texts = (
                    self._files
                    if transaction is None
                    else self._files.with_transaction(transaction)
                )
                recorded = [
                    texts.write(f"{self._count + i}/schema", schema.to_json().encode())
                    for i, (_, schema) in enumerate(some)
                ]
                for future in recorded if self._ocdbt else [*writes, *recorded]:
                    future.result()
            self._count += len(some)

    def _open(
        self, index: int, path: str, leaf: np.ndarray | None = None, transaction: Any = None
    ) -> Any:
        where = dict(self._kvstore) | {"path": f"{self._kvstore.get('path', '')}{index}/{path}/"}
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": where}
        if leaf is not None:
            grid = {"name": "regular", "configuration": {"chunk_shape": list(leaf.shape)}}
            spec |= {
                "create": True,
                "metadata": {
                    "shape": list(leaf.shape),
                    "data_type": str(leaf.dtype),
                    "chunk_grid": grid,
                },
            }
        return ts.open(spec, context=self._context, transaction=transaction)

    def get(self, index: int) -> tuple[Any, Schema]:
        text = self._files.read(f"{index}/schema")
        opened = [self._open(index, path) for path in self._paths]
        reads = [array.result().read() for array in opened]
        adapter = nested.nest({path: read.result() for path, read in zip(self._paths, reads)})
        return adapter, Schema.from_json(text.result().value.decode())

    def reopen(self) -> None:
        self._context = ts.Context()
        self._files = ts.KvStore.open(self._kvstore, context=self._context).result()


KINDS: dict[str, Callable[[str], Store]] = {
    "packs": Packs,
    "orbax": Orbax,
    "zarr3": lambda url: Zarr3(url, ocdbt=False),
    "ocdbt": lambda url: Zarr3(url, ocdbt=True),
}


class Adapters:
    """The n-th packed adapter, made when it is asked for."""

    def __init__(self, config: Any):
        shape = config.shape
        heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": shape.d_model // 4}
        cfg = ModelConfig("qwen3", 64, shape.d_model, shape.layers, d_ff=2 * shape.d_model, **heads)
        adapter = AdapterConfig(shape.rank, 2.0, TARGETS)
        self._specs, self._schema, self._seed = (
            lora_tree.adapter_specs(transformer.abstract(cfg), adapter),
            Schema(BASE, adapter),
            config.seed,
        )

    def range(self, start: int, count: int) -> list[bytes]:
        rng = np.random.default_rng([self._seed, start])
        return [
            pack(
                jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), self._specs),
                self._schema,
            )
            for _ in range(count)
        ]


class Site:
    """A folder or a bucket for all stores, and what one of them takes there."""

    def __init__(self, root: str | Path):
        self.root = str(root)

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"

    def files(self, name: str) -> list[int]:
        """Sizes of the store's files or objects."""
        if self.root.startswith("s3://"):
            return [size for key, size in s3_server.objects() if key.startswith(f"{name}/")]
        return [path.stat().st_size for path in Path(self.url(name)).rglob("*") if path.is_file()]

    def drop_cache(self, name: str) -> None:
        """Takes a folder's files out of the page cache; they were synced when they were written."""
        if self.root.startswith("s3://"):
            return
        for path in Path(self.url(name)).rglob("*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)


def _measure(
    site: Site, config: Any, sizes: Mapping[str, int], loads: int, adapters: Adapters, what: str
) -> dict[str, Any]:
    """One and many revisions in every store that works at this site."""
    out: dict[str, Any] = {}
    kinds, refused = _working(site, adapters)
    out |= {name: {"not measured": reason} for name, reason in refused.items()}
    [lone] = adapters.range(0, 1)
    export: dict[str, list[float]] = {name: [] for name in kinds}
    load: dict[str, list[float]] = {name: [] for name in kinds}
    taken: dict[str, dict[str, Any]] = {}
    for k in range(config.n):
        for name, make in kinds.items():
            where = f"one-{name}-{k}"
            store = make(site.url(where))
            export[name].append(_timed(lambda store=store: store.put([lone])))
            load[name].append(_cold(site, where, store, [0]))
            taken[name] = _space(site, where, len(lone))
    out["one"] = {name: taken[name] | _figures(export, load, name) for name in kinds} | _ratios(
        export, load
    )

    stores = {name: make(site.url(f"many-{name}")) for name, make in kinds.items()}
    export, load = {name: [] for name in kinds}, {name: [] for name in kinds}
    progress, held = Progress(f"{what}: export", config.n), dict.fromkeys(kinds, 0)
    for k in range(config.n):
        for name, store in stores.items():
            count = sizes[name] // config.n
            objects = adapters.range(held[name] + 1, count)
            export[name].append(
                _timed(lambda store=store, objects=objects: store.put(objects)) / count
            )
            held[name] += count
        progress.update(
            k + 1,
            " ".join(f"{name} {1e3 * seconds[-1]:.2f} ms" for name, seconds in export.items()),
        )
    draw = random.Random(config.seed)
    for _ in range(config.n):
        for name, store in stores.items():
            load[name].append(
                _cold(
                    site,
                    f"many-{name}",
                    store,
                    draw.sample(range(held[name]), min(loads, held[name])),
                )
            )
    many = {
        name: (
            {"measured": held[name]}
            | _space(site, f"many-{name}", held[name] * len(lone))
            | _figures(export, load, name)
        )
        for name in kinds
    }
    return out | {"many": many | _ratios(export, load)}


def _working(
    site: Site, adapters: Adapters
) -> tuple[dict[str, Callable[[str], Store]], dict[str, str]]:
    """The stores that give back here what they were given, and why others do not."""
    kinds, refused = {}, {}
    [data] = adapters.range(0, 1)
    wanted, schema = unpack(data)
    for name, make in KINDS.items():
        try:
            store = make(site.url(f"try-{name}"))
            store.put([data])
            store.reopen()
            found, recorded = store.get(0)
        except Exception as error:
            if name == "packs":
                raise
            refused[name] = (
                f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
            )
            continue
        assert recorded == schema, f"{name} gave back another schema"
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        kinds[name] = make
    return kinds, refused


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _cold(site: Site, where: str, store: Store, indices: Sequence[int]) -> float:
    """Seconds a load, by a store that was just opened."""
    site.drop_cache(where)
    store.reopen()
    return _timed(lambda: [store.get(i) for i in indices]) / len(indices)


def _space(site: Site, where: str, payload: int) -> dict[str, Any]:
    sizes = site.files(where)
    return {
        "files": len(sizes),
        "bytes": sum(sizes),
        "bytes_over_payload": round(sum(sizes) / payload, 3),
    }


def _figures(
    export: Mapping[str, list[float]], load: Mapping[str, list[float]], name: str
) -> dict[str, Any]:
    return {
        "export_ms_each": timing.median(export[name], 1e3),
        "cold_load_ms": timing.median(load[name], 1e3),
    }


def _ratios(export: Mapping[str, list[float]], load: Mapping[str, list[float]]) -> dict[str, Any]:
    """How many times longer each store takes than packs."""
    sides = {"export": export, "cold_load": load}
    return {
        f"ratio_{what}_{name}": timing.ratio(of, name, "packs")
        for what, of in sides.items()
        for name in of
        if name != "packs"
    }


@contextlib.contextmanager
def _bucket() -> Iterator[Site | str]:
    """A bucket, or why there is none."""
    if (reason := s3_server.lacking()) is not None:
        yield reason
        return
    with s3_server.serving() as url:
        yield Site(url)


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. The files it makes are removed."""
    if config.n < 5:
        raise UserError(f"n is {config.n}; medians need at least 5")
    folder = (workdir / "revision_stores").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    adapters = Adapters(config)
    [data] = adapters.range(0, 1)
    began = time.monotonic()
    report: dict[str, Any] = {
        "bench": "revision_stores",
        "device": timing.device(),
        "cores": os.cpu_count(),
        "n": config.n,
    }
    report |= {
        "revision_bytes": len(data),
        "arrays": len(list(nested.leaves_with_path(unpack(data)[0]))),
        "entries": config.entries,
    }
    try:
        sizes: dict[str, int] = dict.fromkeys(KINDS, int(config.others)) | {
            "packs": int(config.entries)
        }
        report["folder"] = _measure(Site(folder), config, sizes, config.loads, adapters, "folder")
        with _bucket() as bucket:
            if isinstance(bucket, str):
                report["s3"] = {"not measured": bucket}
            else:
                sizes = dict.fromkeys(KINDS, int(config.s3.others)) | {
                    "packs": int(config.s3.entries)
                }
                report["s3"] = _measure(bucket, config, sizes, config.s3.loads, adapters, "S3")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report | {"wall_s": round(time.monotonic() - began, 1)}
