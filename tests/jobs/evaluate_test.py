"""evaluate: scores that name what produced them, and the refusal of scores that a shared batch does not give back."""

import dataclasses

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from mint_jax import mesh
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, digest_of, pack
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, agreement, evaluate
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.rollout.engine import Completion

pytestmark = pytest.mark.usefixtures("quick_compiles")


def make():
    """An environment whose reward differs between any two completions."""
    from mint_jax.envs.env import Example, ListEnvironment

    examples = [Example(f"{i * 7919} is", str(i)) for i in range(12)]
    return ListEnvironment(examples, examples[:6], lambda completion, example: sum(map(ord, completion)) % 11 / 11)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    """A folder with policies ``one`` (rank 2) and ``two`` (rank 5) over tiny-random, whose adapters change most tokens."""
    place = tmp_path_factory.mktemp("catalog")
    base = base_lib.load("tiny-random", mesh.make_mesh({"data": 1}, jax.devices()[:1]))
    rng = np.random.default_rng(0)
    with Catalog.open(place) as opened:
        for name, rank in (("one", 2), ("two", 5)):
            config = AdapterConfig(rank, 2.0 * rank)
            specs = lora_tree.adapter_specs(transformer.abstract(base.cfg), config)
            adapter = jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.3).astype(np.float32), specs)
            opened.export(name, pack(adapter, Schema(base.fingerprint, config)), 1, create=True)
    return place


def config_of(catalog, **fields) -> ConfigDict:
    chosen = {"base": "", "one": "one@latest", "two": "two@1"}
    sampling = {"max_tokens": 4, "temperature": 1.0}
    settings = {"env": {"name": "tests.jobs.evaluate_test:make"}, "examples": 6, "samples": 4, "max_rows": 16, "seed": 3}
    return ConfigDict(
        {"job": "evaluate", "base": "tiny-random", "dtype": "float32", "mesh": {"data": 1}, "catalog": str(catalog), "adapters": chosen}
        | {"sampling": sampling, **settings, **fields}
    )


def test_a_score_is_recorded_with_everything_that_produced_it(catalog, tmp_path):
    result = evaluate.run(config_of(catalog), tmp_path)
    rows = {row["name"]: row for row in result["results"]}
    assert len({row["reward"] for row in rows.values()}) == 3, "the adapters do not differ"
    with Catalog.open(catalog) as opened:
        for name in ("one", "two"):
            (score,) = opened.evaluations(name)
            assert score.digest == opened.resolve(name).digest == rows[name]["revision"]
            assert (score.base, score.seed) == (result["base"], 3)
            assert (score.renderer, score.scorer, score.dataset) == (result["renderer"], result["scorer"], result["dataset"])
            assert (round(score.isolated, 4), round(score.shared, 4)) == (rows[name]["reward"], rows[name]["shared"])
            assert score.metrics["rows"] == 24
            assert score.metrics["sampling"]["max_tokens"] == 4
            assert score.metrics["rows_differ"] <= score.metrics["rows_may_differ"] <= 2
    other = evaluate.run(config_of(catalog, examples=5, adapters={"base": "", "same": ""}), tmp_path)
    assert other["dataset"] != result["dataset"]
    assert (other["renderer"], other["scorer"]) == (result["renderer"], result["scorer"])
    assert other["results"][0]["reward"] == other["results"][1]["reward"]


def test_few_slots_give_the_same_scores(catalog, tmp_path):
    """Whom an adapter shares its batch with changes nothing but rounding."""
    many, few = (evaluate.run(config_of(catalog, slots=slots, seed=5), tmp_path)["results"] for slots in (64, 1))
    for a, b in zip(many, few, strict=True):
        assert (a["name"], a["revision"], a["rows"]) == (b["name"], b["revision"], b["rows"])
        assert abs(a["reward"] - b["reward"]) <= 2 / a["rows"]  # a token may differ where two logits all but tie
    with pytest.raises(UserError, match="slots is 0; expected"):
        evaluate.run(config_of(catalog, slots=0), tmp_path)


def swapped(loaded):
    """Each adapter under the next one's name, as far as their ranks allow."""
    return dict(zip(loaded, [*list(loaded.values())[1:], next(iter(loaded.values()))]))


def nudged(loaded):
    """Adapters whose B is a hundredth too large."""

    def nudge(path, leaf):
        return leaf * np.float32(1.01)

    return {n: dataclasses.replace(a, adapter=jax.tree_util.tree_map_with_path(nudge, a.adapter)) for n, a in loaded.items()}


@pytest.mark.parametrize("wrong", [swapped, nudged])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_shared_batch_that_serves_another_adapter_is_refused(wrong, temperature, catalog, tmp_path, monkeypatch):
    right = adapters.make_resident
    monkeypatch.setattr(adapters, "make_resident", lambda loaded, base: right(wrong(loaded) if len(loaded) > 1 else loaded, base))
    with Catalog.open(catalog) as opened:
        before = [opened.evaluations(name) for name in ("one", "two")]
        with pytest.raises(
            UserError, match=r"'one' \(one@latest\): score 0\.\d+ loaded alone and 0\.\d+ in a shared batch.*nothing is recorded"
        ):
            evaluate.run(config_of(catalog, sampling={"max_tokens": 4, "temperature": temperature}), tmp_path)
        assert [opened.evaluations(name) for name in ("one", "two")] == before


def completions(rows, logprob=-1.0):
    return [Completion(list(tokens), [logprob] * len(tokens), [logprob] * len(tokens), "length", "") for tokens in rows]


def test_the_rule():
    rows = [[i, i + 1, i + 2] for i in range(40)]
    rewards = [float(i % 2) for i in range(40)]
    same = agreement.compare(completions(rows), completions(rows), (rewards, rewards), "float32", 1.0)
    assert same.holds
    assert (same.differ, same.allowed, same.gap) == (0, 1, 0.0)
    one = [[9, 9, 9], *rows[1:]]
    assert agreement.compare(completions(rows), completions(one), (rewards, [1.0, *rewards[1:]]), "float32", 1.0).holds
    two = [[9, 9, 9], [8, 8, 8], *rows[2:]]
    found = agreement.compare(completions(rows), completions(two), (rewards, rewards), "float32", 1.0)
    assert not found.holds
    assert "2 of 40 rows" in str(found)
    near = completions(rows, -1.01)
    assert not agreement.compare(completions(rows), near, (rewards, rewards), "float32", 1.0).holds
    assert agreement.compare(completions(rows), near, (rewards, rewards), "bfloat16", 1.0).holds
    # 40 rows of 3 tokens, twice 0.01: 2.4 rows are expected to differ, 2.4 + 3 * 1.56 + 1 may
    assert agreement.compare(completions(rows), near, (rewards, rewards), "bfloat16", 1.0).allowed == 8
    assert not agreement.compare(completions(rows), completions(rows), (rewards, [1.0] * 40), "float32", 1.0).holds


def test_digests_are_of_the_bytes(catalog):
    with Catalog.open(catalog) as opened:
        assert digest_of(opened.load("one")) == opened.resolve("one").digest
