"""The bench of loading measures what jobs do: the same functions with the same settings; every load
it times ends in time.
"""

import contextlib
import importlib.util
from pathlib import Path

import jax
import pytest

from benchmarks import packed_load, packed_store, timing
from benchmarks.packed_store import Store, load, residency_of
from mint_jax import digest
from mint_jax.catalog.packed import Schema, pack
from mint_jax.harness.adapters import pool_of
from mint_jax.harness.catalogs import JobCatalog
from mint_jax.models import transformer
from mint_jax.residency import opening
from tests.rollout.score_test import random_adapters

CONFIG = Path(__file__).parents[2] / "configs" / "bench" / "packed_load.py"


def config_of(size: str):
    spec = importlib.util.spec_from_file_location("packed_load_config", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(size)


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


@pytest.mark.slow  # the short form runs in benchmarks/benches_test.py
def test_the_short_bench_runs_and_every_load_is_inside_its_window(tmp_path):
    config = config_of("ci")
    config.distinct, config.small.count = 3, 20
    config.peft.update({"layers": 1, "d_model": 64})
    report = packed_load.run(config, tmp_path)
    assert report["same_values"]
    assert report["same3_loads"] == 1
    assert report["decode_loads"] == config.pause.windows
    assert report["decode_steps"] >= config.pause.windows
    for name in ("ratio_packed", "load_ms", "cold3_over_1", "decode_pause_p99", "decode_load_ms"):
        assert timing.is_figure(report[name]), name
        assert report[name]["n"] >= 5
    assert list(tmp_path.iterdir()) == [], "the files it makes are removed"
    config.pause.longest = 1
    with pytest.raises(
        RuntimeError, match=r"did not end within 1 decode steps: raise config\.pause\.longest"
    ):
        packed_load.decode_pause(config, packed_load.Files(config, tmp_path))
