"""More adapters than slots: whole jobs against PEFT; leases and damage."""

import contextlib
from pathlib import Path

import jax
import numpy as np
import pytest

from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.errors import UserError
from mint_jax.harness.adapters import AdapterSource, JobCatalog
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.peft import write_peft
from mint_jax.models import hf, transformer
from mint_jax.residency.pool import Pool
from tests.configs import run_config
from tests.recipes.inference_test import ATOL, config_of, read_lines, torch_logprobs, write_lines
from tests.rollout.score_test import random_adapters


@pytest.fixture
def stored(rng, tiny_base, tmp_path):
    """Two adapters of each kind, as revisions ``name@1`` and as PEFT directories."""
    base = tiny_base("llama")
    specs = transformer.abstract(base.cfg)
    kinds = [random_adapters(rng, base.cfg) for _ in range(2)]  # of equal buckets
    adapters = {f"{name}{k}": one for k, kind in enumerate(kinds) for name, one in kind.items()}
    place = JobCatalog(tmp_path / "catalog", create=True)
    for name, (config, adapter) in adapters.items():
        place.main.export(name, pack(adapter, Schema(base.fingerprint, config)), 1, create=True)
        names = hf.module_names(base.cfg, lora_tree.projections(specs, config.targets))
        write_peft(tmp_path / "peft" / name, adapter, config, names)
    with contextlib.closing(place):
        yield place, sorted(adapters), tmp_path / "peft"


def pool_of(base, names, place) -> Pool:
    return Pool(base, AdapterSource(base, place), names, slots=1)


def leases(place: JobCatalog) -> int:
    with place.main.database.engine.connect() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM leases").scalar()


@pytest.mark.long
def test_one_slot_serves_all_and_each_is_itself(stored, hf_dirs, rng, tmp_path):
    place, names, folder = stored
    directories = {name: str(folder / name) for name in names} | {None: None}
    owners = [*names, None, names[0], names[1], None, names[-1]]
    texts = [rng.integers(3, 97, 4 + i).tolist() for i in range(len(owners))]
    rows = [{"id": i, "tokens": t, "adapter": a} for i, (t, a) in enumerate(zip(texts, owners))]
    rows[-3]["adapter"] = directories[names[1]]  # the same adapter as a PEFT directory
    write_lines(tmp_path / "in.jsonl", rows)
    fields = {"base": str(hf_dirs("llama")), "input": str(tmp_path / "in.jsonl")}
    fields |= {"catalog": place.place, "output": str(tmp_path / "out.jsonl")}

    def lines(job, **settings):
        result = run_config(config_of(job, **fields, **settings), tmp_path / "work")
        assert result["adapters"] == len(names) + 1
        return read_lines(tmp_path / "out.jsonl")

    def expected(owner, tokens):
        return torch_logprobs(hf_dirs("llama"), directories[owner], tokens)

    few, many = lines("score", slots=1), lines("score", slots=64)
    sampled = lines("sample", slots=1, sampling={"max_tokens": 4, "temperature": 0.0}, max_rows=8)
    for row, owner, one, two, line in zip(rows, owners, few, many, sampled, strict=True):
        assert one["id"] == two["id"] == row["id"]
        np.testing.assert_allclose(one["logprobs"][1:], expected(owner, row["tokens"]), atol=ATOL)
        # batches of other rows
        np.testing.assert_allclose(one["logprobs"][1:], two["logprobs"][1:], atol=1e-5)
        assert line["revision"] == (None if owner is None else place.main.resolve(owner).digest)
        [made] = line["completions"]
        wanted = expected(owner, row["tokens"] + made["tokens"])[len(row["tokens"]) - 1 :]
        np.testing.assert_allclose(made["logprobs"], wanted, atol=ATOL)
    assert leases(place) == 0


def test_what_was_named_is_served_whatever_becomes_of_the_name(stored, tiny_base):
    place, names, _ = stored
    digests = {name: place.main.resolve(name).digest for name in names}
    turns = []

    def retire_all(turn):
        if not turns:
            for name in names:
                adapter, schema = unpack(place.main.load(name))
                place.main.export(name, pack(jax.tree.map(np.negative, adapter), schema), 2)
                place.main.retire(name, 1)
            assert not place.main.gc(grace_s=0.0).revisions, "they are leased"
        turns.append(turn.rows)
        return [turn.slots.keys() for _ in turn.rows]

    with pool_of(tiny_base("llama"), names, place) as pool:
        pool.run(retire_all)
        assert pool.digests == digests
    assert len(turns) > 1
    assert leases(place) == 0
    place.main.gc(grace_s=0.0)
    assert not any(place.main.holds(list(digests.items()))), "then they may go"


def test_damage_that_shows_on_loading_is_named(stored, tiny_base):
    place, names, _ = stored
    found = place.main.resolve(names[-1])
    [path] = [p for p in Path(place.place).rglob("*.pack") if p.stem == found.place.pack]
    data = bytearray(path.read_bytes())
    data[found.place.offset + found.place.length - 3] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)
    says = rf"{found.digest[:12]}.*(damaged|corrupt)"
    with pytest.raises(UserError, match=says), pool_of(tiny_base("llama"), names, place) as pool:
        pool.run(lambda turn: turn.rows)
    assert leases(place) == 0
