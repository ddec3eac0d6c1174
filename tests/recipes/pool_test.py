"""More adapters than slots: whole jobs against PEFT, and what turns keep, refuse and give back."""

import contextlib
import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.errors import UserError
from mint_jax.harness import adapters
from mint_jax.harness.adapters import pool_of
from mint_jax.harness.catalogs import JobCatalog
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.peft import write_peft
from mint_jax.models import hf, transformer
from tests.configs import run_config
from tests.recipes.inference_test import ATOL, config_of, read_lines, torch_logprobs, write_lines
from tests.rollout.score_test import random_adapters


@pytest.fixture
def stored(rng, tiny_base, tmp_path):
    """A catalog's folder with one revision ``name@1`` of each random adapter, and of each a PEFT
    directory.
    """
    base = tiny_base("llama")
    specs = transformer.abstract(base.cfg)
    adapters = {}
    for k in range(2):  # ``eight`` and ``tables`` share a bucket
        adapters |= {f"{name}{k}": one for name, one in random_adapters(rng, base.cfg).items()}
    place = JobCatalog(tmp_path / "catalog", create=True)
    for name, (config, adapter) in adapters.items():
        place.main.export(name, pack(adapter, Schema(base.fingerprint, config)), 1, create=True)
        names = hf.module_names(base.cfg, lora_tree.projections(specs, config.targets))
        write_peft(tmp_path / "peft" / name, adapter, config, names)
    with contextlib.closing(place):
        yield place, sorted(adapters), tmp_path / "peft"


def leases(place: JobCatalog) -> int:
    with place.main.database.engine.connect() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM leases").scalar()


def assert_in_slot(turn, slot, rank, stored, dtype=None):
    """The slot of a turn has an adapter's factors, bit for bit."""
    found = lora_tree.read_slot(turn.stacks[slot.bucket], slot.index, rank, stored)
    for (_, ours), (_, theirs) in zip(
        params_lib.leaves_with_path(found), params_lib.leaves_with_path(stored), strict=True
    ):
        assert dtype is None or ours.dtype == dtype
        np.testing.assert_array_equal(ours, np.asarray(theirs).astype(ours.dtype))


@pytest.mark.long
def test_one_slot_serves_all_and_each_is_itself(stored, hf_dirs, rng, tmp_path):
    place, names, folder = stored
    directories = {name: str(folder / name) for name in names} | {None: None}
    owners = [*names, None, names[0], names[1], None, names[-1]]
    rows = [
        {"id": i, "tokens": rng.integers(3, 97, 4 + i).tolist(), "adapter": a}
        for i, a in enumerate(owners)
    ]
    rows[-3]["adapter"] = directories[names[1]]  # the same adapter as a PEFT directory
    write_lines(tmp_path / "in.jsonl", rows)
    fields = {"base": str(hf_dirs("llama")), "input": str(tmp_path / "in.jsonl")}
    fields["catalog"] = place.place

    def lines(job, **settings):
        output = tmp_path / f"{job}{settings['slots']}"
        config = config_of(job, **fields, **settings, output=str(output))
        assert run_config(config, tmp_path / "work")["adapters"] == len(names) + 1
        return read_lines(output)

    few, many = lines("score", slots=1), lines("score", slots=64)
    sampling = {"max_tokens": 4, "temperature": 0.0}
    sampled = lines("sample", slots=1, sampling=sampling, max_rows=8)
    for row, owner, one, two, line in zip(rows, owners, few, many, sampled, strict=True):
        assert one["id"] == two["id"] == row["id"]
        wanted = torch_logprobs(hf_dirs("llama"), directories[owner], row["tokens"])
        np.testing.assert_allclose(one["logprobs"][1:], wanted, atol=ATOL)
        # batches of other rows
        np.testing.assert_allclose(one["logprobs"][1:], two["logprobs"][1:], atol=1e-5)
        assert line["revision"] == (None if owner is None else place.main.resolve(owner).digest)
        [completion] = line["completions"]
        tokens = row["tokens"] + completion["tokens"]
        wanted = torch_logprobs(hf_dirs("llama"), directories[owner], tokens)
        wanted = wanted[len(row["tokens"]) - 1 :]
        np.testing.assert_allclose(completion["logprobs"], wanted, atol=ATOL)
    assert leases(place) == 0


def test_turns_hold_no_more_than_the_room_and_serve_each_row_once(stored, tiny_base):
    place, names, _ = stored
    rows = [None, *names, None, *reversed(names)]
    seen = []

    def look(turn):
        assert all(stack.slots <= 2 for stack in turn.stacks.values())
        assert turn.before == len(seen)
        seen.extend(turn.rows)
        used = list(turn.slots.values())
        assert len(set(used)) == len(used)
        for name, slot in turn.slots.items():
            adapter, schema = unpack(place.main.load(name))
            assert_in_slot(turn, slot, schema.config.rank, adapter)
        return [rows[i] for i in turn.rows]

    with pool_of(tiny_base("llama"), rows, place, 2) as pool:
        assert pool.run(look) == rows
    assert sorted(seen) == list(range(len(rows)))


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

    with pool_of(tiny_base("llama"), names, place, 1) as pool:
        pool.run(retire_all)
        assert pool.digests == digests
    assert len(turns) > 1
    assert leases(place) == 0
    place.main.gc(grace_s=0.0)
    assert not any(place.main.holds(list(digests.items()))), "then they may go"


@pytest.mark.parametrize(
    ("stored_as", "slots_of"),
    [("float32",) * 2, ("bfloat16",) * 2, (("bfloat16", "float16"), "float32")],
)
def test_slots_hold_adapters_as_they_are_stored(tiny_base, rng, tmp_path, stored_as, slots_of):
    """In the narrowest dtype that rounds none of them."""
    base = tiny_base("llama")
    config, adapter = random_adapters(rng, base.cfg)["eight"]
    with contextlib.closing(JobCatalog(tmp_path, create=True)) as place:
        dtypes = dict(enumerate([stored_as] if isinstance(stored_as, str) else stored_as))
        for k, dtype in dtypes.items():
            place.main.export(
                f"p{k}", pack(adapter, Schema(base.fingerprint, config, dtype)), 1, create=True
            )

        def look(turn):
            for name, slot in turn.slots.items():
                stored, _ = unpack(place.main.load(name))
                assert_in_slot(turn, slot, config.rank, stored, slots_of)
            return turn.rows

        with pool_of(base, [f"p{k}" for k in dtypes], place, 2) as pool:
            pool.run(look)


def test_loads_are_verified_once_and_searched_for_nan_only_where_no_record_says_that_there_is_none(
    stored, tiny_base, monkeypatch
):
    place, names, _ = stored
    base = tiny_base("llama")
    adapter, schema = unpack(place.main.load(names[0]))
    bad = jax.tree.map(lambda x: np.full_like(x, np.nan), adapter)
    place.main.export("bad", pack(bad, schema), 1, create=True, force=True)
    searched, hashed = [], []
    monkeypatch.setattr(
        "mint_jax.lora.tree.all_finite", lambda x: searched.append(x) or bool(np.isfinite(x).all())
    )
    for where in (
        "catalog.storage.payloads.digest_of",
        "residency.residency.blake3_of",
        "residency.residency.blake3_alone",
    ):
        monkeypatch.setattr(
            f"mint_jax.{where}", lambda data: hashed.append(data) or digest_of(data)
        )
    with pool_of(base, names, place, 64) as pool:
        pool.run(lambda turn: turn.rows)
    assert len(hashed) == len(names)
    assert searched == []
    for name in names:
        adapters.read_adapter(name, base, place)
    assert searched == []
    with (
        pytest.raises(UserError, match="NaN or infinite"),
        pool_of(base, ["bad"], place, 64) as pool,
    ):
        pool.run(lambda turn: turn.rows)
    with pytest.raises(UserError, match="NaN or infinite"):
        adapters.read_adapter("bad", base, place)


def test_a_job_that_fails_leaves_no_lease(stored, tiny_base):
    place, names, _ = stored

    def fail(_):
        assert leases(place) == len(names)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError), pool_of(tiny_base("llama"), names, place, 1) as pool:
        pool.run(fail)
    assert leases(place) == 0


def test_what_records_tell_is_refused_before_anything_runs(
    stored, tiny_base, hf_dirs, rng, tmp_path
):
    place, names, _ = stored
    base = tiny_base("llama")
    config, adapter = random_adapters(rng, base.cfg)["eight"]
    place.main.export("foreign", pack(adapter, Schema("ab" * 32, config)), 1, create=True)
    absent = Schema(base.fingerprint, dataclasses.replace(config, targets=("router",)))
    router = {
        "dense": {
            "router": {
                "a": np.zeros((1, config.rank, 4), np.float32),
                "b": np.zeros((1, config.rank, 4), np.float32),
            }
        }
    }
    place.main.export("router", pack(router, absent), 1, create=True)
    for wrong, told in [
        ("foreign", r"foreign@1 was trained on base abababababab.*load its own base"),
        ("router", "target 'router' is not a projection"),
        ("nobody", "nobody"),
    ]:
        with pytest.raises(UserError, match=told):
            pool_of(base, [names[2], wrong], place, 1)
        assert leases(place) == 0
    with pytest.raises(UserError, match=r"no catalog is given.*--config\.catalog"):
        pool_of(base, ["p@1"], None, 1)
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2]}])
    fields = {
        "base": str(hf_dirs("llama")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out"),
    }
    with pytest.raises(UserError, match="slots is 0; expected"):
        run_config(config_of("score", **fields, slots=0), tmp_path / "work")
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2]}, {"tokens": [1, 2, 97]}])
    with pytest.raises(UserError, match=r"in\.jsonl:2 has token id 97"):
        run_config(config_of("score", **fields | {"catalog": place.place}), tmp_path / "work")
    assert not (tmp_path / "out").exists()


def test_damage_that_shows_on_loading_is_named(stored, tiny_base):
    place, names, _ = stored
    found = place.main.resolve(names[-1])
    [path] = [p for p in Path(place.place).rglob("*.pack") if p.stem == found.place.pack]
    data = bytearray(path.read_bytes())
    data[found.place.offset + found.place.length - 3] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)
    with (
        pytest.raises(UserError, match=rf"{found.digest[:12]}.*(damaged|corrupt)"),
        pool_of(tiny_base("llama"), names, place, 1) as pool,
    ):
        pool.run(lambda turn: turn.rows)
    assert leases(place) == 0
