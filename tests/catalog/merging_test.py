"""Merges in the catalog: revisions that record their members, over the command line and Python."""

import json

import numpy as np
import pytest

from mint_jax.catalog.cli.main import main
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.errors import UserError
from mint_jax.lora.config import AdapterConfig
from mint_jax.lora.merge import MergeConfig

SCHEMAS = [Schema("ab" * 32, AdapterConfig(rank, 4.0, ("q",))) for rank in (2, 3)]
OTHER = Schema("cd" * 32, AdapterConfig(2, 4.0, ("q",)))


@pytest.fixture
def factors(rng):
    return [
        tuple(rng.normal(size=(1, s.config.rank, n)).astype(np.float32) for n in (8, 6))
        for s in (*SCHEMAS, OTHER)
    ]


@pytest.fixture
def folder(tmp_path, factors):
    """A catalog of the policies ``p0`` and ``p1`` of one base, and ``other`` of another one."""
    with Catalog.open(tmp_path) as catalog:
        for name, schema, (a, b) in zip(("p0", "p1", "other"), (*SCHEMAS, OTHER), factors):
            data = pack({"dense": {"attn": {"q": {"a": a, "b": b}}}}, schema)
            catalog.export(name, data, 3, create=True)
        catalog.promote("p0", 1, "serving")
    return tmp_path


def test_a_merge_is_a_revision_with_its_members(folder, factors, capsys):
    args = ["merge", "both", "p0@serving", "p1@1", "--weights=0.5,-2", "--why=try"]
    assert main([f"--catalog={folder}", "--json", *args]) == 0
    made = json.loads(capsys.readouterr().out)["revision"]
    with Catalog.open(folder) as catalog:
        members = [catalog.resolve(name) for name in ("p0@1", "p1@1")]
        record = {"method": "sum", "density": 1.0, "rank": 5, "seed": 0, "relative_error": 0.0}
        record["members"] = [
            {"policy": one.policy, "number": 1, "digest": one.digest, "weight": weight}
            for one, weight in zip(members, (0.5, -2.0))
        ]
        assert (made["policy"], made["number"], made["merge"]) == ("both", 1, record)
        assert catalog.revision("both", 1).merge == record
        assert catalog.revision("p0", 1).merge is None
        adapter, schema = unpack(catalog.load("both@latest"))
        assert (schema.base, schema.config.scale) == (SCHEMAS[0].base, 1.0)
        q = adapter["dense"]["attn"]["q"]
        found = np.swapaxes(q["a"], -1, -2) @ q["b"]
        wanted = sum(
            weight * schema.config.scale * np.swapaxes(a, -1, -2) @ b
            for weight, schema, (a, b) in zip((0.5, -2.0), SCHEMAS, factors)
        )
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        same = catalog.merge("both", ["p0@1", "p1@1"], [0.5, -2.0])
        assert (same.number, same.digest) == (1, made["digest"])
        [audited] = [e for e in catalog.audit("both") if e.action == "export"]
        assert audited.why == "try"
        average = catalog.merge("both", ["p0@1", "p1@1"])
        assert [one["weight"] for one in average.merge["members"]] == [0.5, 0.5]
        how = MergeConfig("dare_ties", 0.5, 4, seed=3)
        ties = catalog.merge("cut", ["p0@1", "p1@1"], how=how)
        assert [one["weight"] for one in ties.merge["members"]] == [1.0, 1.0]
        assert ties.merge["relative_error"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["m", "p0@1", "other@1"], "p0@1 and other@1 are of two bases"),
        (["m", "p0@1", "p1@9"], "9"),
        (["m", "p0@1", "p1@1", "--weights=1"], "2 members and 1 weights"),
        (["m", "p0@1", "--density=0.5"], "1 for a sum"),
        (["p0", "p0@1", "p1@1"], "export it as another policy"),
    ],
)
def test_wrong_merges_are_refused(folder, capsys, args, message):
    assert main([f"--catalog={folder}", "merge", *args]) != 0
    assert message in capsys.readouterr().err
    with Catalog.open(folder) as catalog:
        assert catalog.revisions("p0")[-1].number == 1
        with pytest.raises(UserError):
            catalog.policy("m")


def test_a_merge_keeps_the_newest_evaluation_of_each_member(folder):
    with Catalog.open(folder) as catalog:
        about = {"renderer": "text", "scorer": "exact", "dataset": "ab" * 32, "seed": 0}
        for mean in (0.25, 0.75):
            metrics = {"mean_reward": mean, "rewards": [mean]}
            catalog.record_evaluation("p0@1", **about, metrics=metrics, isolated=mean, shared=mean)
        made = catalog.merge("both", ["p0", "p1"])
        first, second = made.merge["members"]
    assert first["evaluation"] == {"mean_reward": 0.75, "scorer": "exact", "dataset": "ab" * 32}
    assert "evaluation" not in second
