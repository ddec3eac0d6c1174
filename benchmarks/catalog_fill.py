"""Fills catalogs with many policies and distinct packed adapters: of a few KB each, of a tiny base,
or of SmolLM2's shapes.

Entry ``k`` is revision ``k // policies + 1`` of policy ``k % policies``: every policy is exported
once, then every policy again, as training does. The seed and the batch number determine the bytes
of a batch, so a reader knows what to expect.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from benchmarks import timing
from mint_jax import host
from mint_jax import params as params_lib
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import BIAS, AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig

BASE = "0" * 64  # fingerprint of the base that is only a shape here
DTYPE = "bfloat16"
ROOM = 5000  # bytes of disk for an entry's rows and their log, without its payload


class Form(NamedTuple):
    """Shapes of a base and of adapters over it."""

    base: str  # a name of SHAPES
    adapter: AdapterConfig

    @property
    def specs(self) -> Any:
        """The base, as shapes."""
        return transformer.abstract(SHAPES[self.base])


SHAPES = {
    "tiny": ModelConfig("qwen3", 64, 64, 2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128),
    "smollm2": ModelConfig(
        *("llama", 49152, 576, 30), num_heads=9, num_kv_heads=3, head_dim=64, d_ff=1536
    ),
}
FORMS = {
    "tiny": Form("tiny", AdapterConfig(2, 4.0, ("q", "v"))),
    "bias": Form("smollm2", AdapterConfig(kind=BIAS, targets=("o",))),
}


class Plan(NamedTuple):
    """Contents of a catalog: ``entries`` revisions, ``batch`` of them in a transaction and pack;
    ``form`` is a name of ``FORMS``.
    """

    entries: int
    per_policy: int
    batch: int
    seed: int
    form: str = "tiny"

    @property
    def policies(self) -> int:
        return -(-self.entries // self.per_policy)

    def policy(self, k: int) -> str:
        """Name of the policy of entry ``k``, or of policy ``k``."""
        return f"policy-{k % self.policies:07d}"

    def newest(self, policy: int) -> int:
        """Number of a policy's newest revision."""
        return -(-(self.entries - policy) // self.policies)

    def batches(self) -> Iterator[range]:
        """Runs of entries."""
        for start in range(0, self.entries, self.batch):
            yield range(start, min(start + self.batch, self.entries))


class Payloads:
    """Packed adapters: one packed in earnest, then others with the same header and other
    numbers.
    """

    def __init__(self, seed: int, form: Form):
        self._seed = seed
        wanted = lora_tree.adapter_specs(form.specs, form.adapter)
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), wanted)
        model, self._size = pack(zeros, Schema(BASE, form.adapter, DTYPE)), params_lib.count(wanted)
        self._head, self.nbytes = model[: -2 * self._size], len(model)
        unpack(self.batch(0, 1)[0])  # raises, should the header not fit

    def batch(self, number: int, count: int) -> list[bytes]:
        """``count`` objects; the same for the same number and count."""
        rng = np.random.default_rng((self._seed, number))
        rows = rng.standard_normal((count, self._size), np.float32)
        rows = rows.astype(ml_dtypes.bfloat16).view(np.uint8)
        return [self._head + row.tobytes() for row in rows]


def open_catalog(folder: Path, database: str | None = None, actor: str = "trainer") -> Catalog:
    """The catalog of a folder, its records in a database elsewhere if one is named."""
    if database is None:
        return Catalog.open(folder, actor=actor)
    return Catalog.open(database, folder / "payloads", actor=actor)


def fill(folder: Path, plan: Plan, database: str | None = None) -> dict[str, Any]:
    """Makes a catalog; returns what it took and what lies on the disk afterwards."""
    payloads, free = Payloads(plan.seed, FORMS[plan.form]), shutil.disk_usage(folder).free
    if free < (nbytes := plan.entries * (payloads.nbytes + ROOM)):
        need = f"{plan.entries} entries need {nbytes / 1e9:.0f} GB of disk"
        raise UserError(f"{need}, {folder} has {free / 1e9:.0f}: choose another workdir")
    seconds, work, batches = [], [], list(plan.batches())
    with open_catalog(folder, database) as catalog:
        for number, batch in enumerate(timing.counted(f"catalog of {plan.entries}", batches)):
            objects = payloads.batch(number, len(batch))
            exports = [
                Export(plan.policy(k), data, 100 * (k // plan.policies + 1))
                for k, data in zip(batch, objects, strict=True)
            ]
            used = time.process_time()
            seconds.append(timing.seconds_of(lambda e=exports: catalog.export_many(e, create=True)))
            work.append(time.process_time() - used)
        counts = catalog.stats()
    found = counts["revisions"], counts["payloads"], counts["policies"]
    if found != (plan.entries, plan.entries, plan.policies):
        raise AssertionError(
            f"the catalog should have {plan.entries} different revisions of {plan.policies}"
            f" policies, it has {counts}"
        )
    last = max(1, len(seconds) // 10)  # batches
    done = sum(map(len, batches[-last:]))
    return {
        "entries": plan.entries,
        "policies": plan.policies,
        "per_policy": plan.per_policy,
        "batch": plan.batch,
        "object_bytes": payloads.nbytes,
        "create_s": timing.total(seconds),
        "entries_per_s": round(plan.entries / sum(seconds), 1),
        "entries_per_s_last_tenth": round(done / sum(seconds[-last:]), 1),
        "entries_per_cpu_s": round(plan.entries / sum(work), 1),
        **on_disk(folder),
        "packs": counts["packs"],
        "create_rss_peak_bytes": host.peak_rss_bytes(),
        "payload_bytes": counts["payload_bytes"],
    }


def on_disk(folder: Path) -> dict[str, int]:
    """Bytes and files below a folder, and the bytes of its database."""
    files = [Path(where) / name for where, _, names in os.walk(folder) for name in names]
    sizes = {path: path.stat().st_size for path in files}
    database = sum(size for path, size in sizes.items() if path.name.startswith("catalog.db"))
    return {"bytes": sum(sizes.values()), "files": len(files), "database_bytes": database}


def drop_from_page_cache(folder: Path) -> None:
    """Makes the next reads of a folder's files come from the disk, on systems that can."""
    if hasattr(os, "posix_fadvise"):
        for path in filter(Path.is_file, folder.rglob("*")):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
