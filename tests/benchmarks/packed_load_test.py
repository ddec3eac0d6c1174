"""The bench of loading measures what jobs do: the same functions with the same settings."""

import contextlib

import jax
import pytest

from benchmarks import packed_store
from benchmarks.packed_store import Store, load, residency_of
from mint_jax import digest
from mint_jax.catalog.packed import Schema, pack
from mint_jax.harness.adapters import pool_of
from mint_jax.harness.catalogs import JobCatalog
from mint_jax.models import transformer
from mint_jax.residency import opening
from tests.rollout.score_test import random_adapters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bench_loads_as_jobs_do(tiny_base, rng, tmp_path, monkeypatch, dtype):
    """Which slots, threads, checks and hashes: all that decides how long a load takes is the same
    on both sides.
    """
    base = tiny_base("llama")
    monkeypatch.setattr(packed_store, "BASE", base.fingerprint)
    config, adapter = random_adapters(rng, base.cfg)["eight"]
    objects = [pack({"dense": adapter["dense"]}, Schema(base.fingerprint, config, dtype))]
    opened, hashed = [], []
    real = opening.Residency

    def spy(fetch, unpack, admission, slots, host_bytes, **settings):
        dtypes = {
            leaf.dtype.name
            for stack in slots.stacks.values()
            for leaf in jax.tree.leaves(stack.factors)
        }
        # as many as there are revisions: how many may wait, not how they are loaded
        settings.pop("depth")
        opened.append(
            (
                slots.piece_bytes,
                dtypes,
                {found in admission.finite for found in store.found},
                settings,
                unpack,
            )
        )
        return real(fetch, unpack, admission, slots, host_bytes, **settings)

    monkeypatch.setattr(opening, "Residency", spy)
    for name in ("blake3_of", "blake3_alone"):
        monkeypatch.setattr(
            f"mint_jax.residency.residency.{name}", _noting(hashed, name, getattr(digest, name))
        )
    store = Store(tmp_path)
    digests = store.add(objects)
    bench = residency_of(store, transformer.abstract(base.cfg), 1)
    load(bench, digests)
    bench.close()
    with contextlib.closing(JobCatalog(tmp_path)) as place, pool_of(base, ["p0"], place, 1) as pool:
        pool.run(lambda turn: turn.rows)
    theirs, mine = opened
    assert theirs == mine
    assert mine[:3] == (opening.PIECE_BYTES, {dtype}, {True})
    assert hashed == ["blake3_of"] * 2, "once a load, on all cores, for nothing else runs"


def _noting(notes: list, name: str, real):
    return lambda data: notes.append(name) or real(data)
