"""evaluate: scores that name what produced them, and the refusal of scores that a shared batch does
not give back.
"""

import contextlib
import dataclasses
import json
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from mint_jax import mesh
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.recipes import agreement
from mint_jax.residency import pool
from mint_jax.rollout.request import Completion
from tests.configs import run_config


def make():
    """An environment whose reward differs between any two completions."""
    from mint_jax.envs.env import Example, ListEnvironment

    examples = [Example(f"{i * 7919} is", str(i)) for i in range(12)]
    return ListEnvironment(
        examples, examples[:6], lambda completion, example: sum(map(ord, completion)) % 11 / 11
    )


def store(place, base, scale):
    """A catalog's folder with policies ``one`` (rank 5) and ``two`` (rank 8), whose random factors
    have this standard deviation.
    """
    rng = np.random.default_rng(0)
    with Catalog.open(place) as opened:
        for name, rank in (("one", 5), ("two", 8)):
            config = AdapterConfig(rank, 2.0 * rank)
            specs = lora_tree.adapter_specs(transformer.abstract(base.cfg), config)
            adapter = jax.tree.map(
                lambda s: rng.normal(size=s.shape, scale=scale).astype(np.float32), specs
            )
            opened.export(name, pack(adapter, Schema(base.fingerprint, config)), 1, create=True)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    """Policies over tiny-random whose adapters change most tokens."""
    place = tmp_path_factory.mktemp("catalog")
    store(place, base_lib.load("tiny-random", mesh.make_mesh({"data": 1}, jax.devices()[:1])), 0.3)
    return place


def config_of(catalog, **fields) -> ConfigDict:
    chosen = {"base": "", "one": "one@latest", "two": "two@1"}
    sampling = {"max_tokens": 4, "temperature": 1.0}
    settings = {
        "env": {"name": "tests.recipes.evaluate_test:make"},
        "examples": 6,
        "samples": 4,
        "max_rows": 16,
        "seed": 3,
    }
    return ConfigDict(
        {
            "job": "evaluate",
            "base": "tiny-random",
            "dtype": "float32",
            "mesh": {"data": 1},
            "catalog": str(catalog),
            "adapters": chosen,
        }
        | {"sampling": sampling, **settings, **fields}
    )


@pytest.mark.long
def test_a_score_is_recorded_with_everything_that_produced_it(catalog, tmp_path):
    result = run_config(config_of(catalog), tmp_path)
    rows = {row["name"]: row for row in result["results"]}
    assert len({row["reward"] for row in rows.values()}) == 3, "the adapters do not differ"
    with Catalog.open(catalog) as opened:
        for name in ("one", "two"):
            (score,) = opened.evaluations(name)
            assert score.digest == opened.resolve(name).digest == rows[name]["revision"]
            assert (score.base, score.seed) == (result["base"], 3)
            assert (score.renderer, score.scorer, score.dataset) == (
                result["renderer"],
                result["scorer"],
                result["dataset"],
            )
            assert (round(score.isolated, 4), round(score.shared, 4)) == (
                rows[name]["reward"],
                rows[name]["shared"],
            )
            assert score.metrics["rows"] == 24
            assert score.metrics["sampling"]["max_tokens"] == 4
            assert score.metrics["rows_differ"] <= score.metrics["rows_may_differ"] <= 2
    other = run_config(config_of(catalog, examples=5, adapters={"base": "", "same": ""}), tmp_path)
    assert other["dataset"] != result["dataset"]
    assert (other["renderer"], other["scorer"]) == (result["renderer"], result["scorer"])
    assert other["results"][0]["reward"] == other["results"][1]["reward"]


@pytest.mark.long
def test_few_slots_give_the_same_scores(catalog, tmp_path):
    """Whom an adapter shares its batch with changes nothing but rounding."""
    many, few = (
        run_config(config_of(catalog, slots=slots, seed=5), tmp_path)["results"]
        for slots in (64, 1)
    )
    for a, b in zip(many, few, strict=True):
        assert (a["name"], a["revision"], a["rows"]) == (b["name"], b["revision"], b["rows"])
        # a token may differ where two logits all but tie
        assert abs(a["reward"] - b["reward"]) <= 2 / a["rows"]
    with pytest.raises(UserError, match="slots is 0; expected"):
        run_config(config_of(catalog, slots=0), tmp_path)


@pytest.mark.long
def test_a_revision_is_sampled_as_it_was_trained_unless_told_otherwise(tmp_path):
    """The held-out reward that training reported comes out again; the record says whose settings
    they were.
    """
    config = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "tiny" / "grpo.py"))[
        "get_config"
    ]()
    for name in ("cispo", "reinforce"):
        del config.policies[name]
    policy = config.policies.ppo
    policy.env.name = "tests.recipes.evaluate_test:make"
    policy.optimizer.learning_rate = 0.1
    policy.sampling = {"prompts": 2, "group_size": 2, "max_tokens": 11, "stop": ("e",)}
    config.update({"steps": 3, "eval": {"examples": 6, "samples": 4}})
    trained = run_config(config, tmp_path / "grpo")
    catalog = tmp_path / "grpo" / "catalog"
    fields = {"adapters": {"base": "", "ppo": "ppo@latest"}, "seed": 0}
    found = run_config(config_of(catalog, **fields, sampling={}), tmp_path / "work")["results"]
    rows = {row["name"]: row for row in found}
    [expected] = trained["policies"]
    assert (rows["base"]["reward"], rows["ppo"]["reward"]) == (
        expected["reward_before"],
        expected["reward_after"],
    )
    assert expected["reward_before"] != expected["reward_after"], "nothing was learned"
    wanted = {
        "max_tokens": 11,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": ("e",),
    }
    assert rows["ppo"]["sampling"] == rows["base"]["sampling"] == wanted
    assert (rows["ppo"]["sampling_from"], rows["base"]["sampling_from"]) == (
        "its training",
        "the training of ppo@latest",
    )
    told = run_config(config_of(catalog, **fields, sampling={"max_tokens": 3}), tmp_path / "work")[
        "results"
    ][1]
    assert told["sampling"] == wanted | {"max_tokens": 3}
    assert told["sampling_from"] == "the config (max_tokens), else its training"
    with Catalog.open(catalog) as opened:
        assert opened.revision("ppo", "latest").sampling == json.loads(json.dumps(wanted))
        assert [score.metrics["sampling_from"] for score in opened.evaluations("ppo")] == [
            "its training",
            told["sampling_from"],
        ]
        opened.branch("other", "ppo@latest")
        assert opened.revision("other", 1).sampling == json.loads(json.dumps(wanted))


def swapped(held):
    """Each adapter under the next one's name."""
    slots = list(held.slots.values())
    return dataclasses.replace(held, slots=dict(zip(held.slots, [*slots[1:], slots[0]])))


def nudged(held, by=1.01):
    """Adapters whose factors are a hundredth too large."""
    larger = {
        b: dataclasses.replace(s, factors=jax.tree.map(lambda x: x * np.float32(by), s.factors))
        for b, s in held.stacks.items()
    }
    return dataclasses.replace(held, stacks=larger)


def serve_wrong(patch, wrong):
    """Batches of several adapters serve others."""
    right = pool.Pool.hold

    @contextlib.contextmanager
    def hold(self, names, following=()):
        with right(self, names, following) as held:
            yield wrong(held) if len(held.slots) > 1 else held

    patch.setattr(pool.Pool, "hold", hold)


REFUSED = (
    r"'one' \(one@latest\): score 0\.\d+ loaded alone and 0\.\d+ in a shared batch.*nothing is"
    r" recorded"
)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [swapped, nudged])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_shared_batch_that_serves_another_adapter_is_refused(
    wrong, temperature, catalog, tmp_path, monkeypatch
):
    serve_wrong(monkeypatch, wrong)
    with Catalog.open(catalog) as opened:
        before = [opened.evaluations(name) for name in ("one", "two")]
        with pytest.raises(UserError, match=REFUSED):
            run_config(
                config_of(catalog, sampling={"max_tokens": 4, "temperature": temperature}), tmp_path
            )
        assert [opened.evaluations(name) for name in ("one", "two")] == before


@pytest.mark.long
def test_in_bfloat16_the_right_adapters_are_recorded_and_others_refused(
    catalog, tmp_path, monkeypatch
):
    """There every row may have other tokens, so that only what the shared batch says of its own
    tokens can tell.
    """
    config = config_of(catalog, dtype="bfloat16", examples=4, samples=2, sampling={"max_tokens": 6})
    rows = {row["name"]: row for row in run_config(config, tmp_path)["results"]}
    for name in ("one", "two"):
        row = rows[name]
        assert 1e-4 < row["shared_error"] <= row["shared_error_may_be"] < 0.1, (
            "adapters differ by more than a nat here"
        )
        assert row["worst_row_error"] <= row["worst_row_error_may_be"] < 0.5
    for wrong in (swapped, lambda held: nudged(held, 1.05)):
        with monkeypatch.context() as patch:
            serve_wrong(patch, wrong)
            with pytest.raises(UserError, match=REFUSED):
                run_config(config, tmp_path)


@pytest.mark.long
def test_a_healthy_adapter_is_accepted_over_many_tokens_at_temperature_1(catalog, tmp_path):
    """An inverse CDF moves every later boundary with a small shift: there 7 of 48 rows of 192
    tokens had others, and it was refused.
    """
    sampling = {"max_tokens": 48, "temperature": 1.0}
    for row in run_config(
        config_of(catalog, adapters={"one": "one@latest"}, sampling=sampling, seed=11), tmp_path
    )["results"]:
        assert row["rows_differ"] <= row["rows_may_differ"] <= 2
        assert row["shared_error"] <= row["shared_error_may_be"] < 1e-4


def sampled(rows, rewards, error=0.0):
    """Rows of tokens whose log-probabilities are off by ``error``: one number, or one a row."""
    errors = np.broadcast_to(error, len(rows))
    said = [[-1.0 + e] * len(tokens) for tokens, e in zip(rows, errors)]
    completions = [
        Completion(list(tokens), values, values, "length", "") for tokens, values in zip(rows, said)
    ]
    return agreement.Sampled(completions, [np.full(len(tokens), -1.0) for tokens in rows], rewards)


def test_the_rule():
    rows = [[i, i + 1, i + 2] for i in range(40)]
    rewards = [float(i % 2) for i in range(40)]
    alone = sampled(rows, rewards)
    same = agreement.compare(alone, alone, "float32", 1.0)
    assert same.holds
    assert (same.differ, same.allowed, same.gap) == (0, 1, 0.0)
    assert agreement.compare(
        alone, sampled([[9, 9, 9], *rows[1:]], [1.0, *rewards[1:]]), "float32", 1.0
    ).holds
    found = agreement.compare(
        alone, sampled([[9, 9, 9], [8, 8, 8], *rows[2:]], rewards), "float32", 1.0
    )
    assert not found.holds
    assert "2 of 40 rows" in str(found)
    # 40 rows of 3 tokens, twice 0.01: 2.4 rows are expected to differ, 2.4 + 3 * 1.56 + 1 may
    assert agreement.compare(alone, sampled(rows, rewards, 0.01), "bfloat16", 1.0).allowed == 8
    for broken in (sampled(rows, rewards, np.nan), sampled(rows, rewards, np.inf)):
        assert not agreement.compare(alone, broken, "bfloat16", 1.0).holds
        assert not agreement.compare(broken, broken, "bfloat16", 1.0).holds


def test_the_rule_for_what_the_shared_batch_says_of_its_tokens():
    rows = [[i, i + 1, i + 2] for i in range(40)]
    rewards = [0.0] * 40
    for noise, dtype in ((0.0, "float32"), (0.03, "bfloat16")):
        alone, least = sampled(rows, rewards, noise), max(noise, agreement.LEAST[dtype])
        assert agreement.compare(alone, sampled(rows, rewards, 1.9 * least), dtype, 1.0).holds
        assert not agreement.compare(alone, sampled(rows, rewards, 2.1 * least), dtype, 1.0).holds
        # one row alone: the mean would not show it
        one = np.where(np.arange(40) == 7, 4.1 * least, noise)
        found = agreement.compare(alone, sampled(rows, rewards, one), dtype, 1.0)
        assert found.error <= found.allowed_error
        assert not found.holds


def test_the_rule_for_rewards_where_all_rows_may_differ():
    """In bfloat16 scores of 1.0 and of 0.0 were accepted, for every row had other tokens."""
    rows, other = [[i, i + 1, i + 2] for i in range(96)], [[i, 5, 5] for i in range(96)]
    draws = np.random.default_rng(0).integers(0, 2, (2, 96)).astype(float)
    noise = 0.15

    def judge(one, two):
        return agreement.compare(
            sampled(rows, list(one), noise), sampled(other, list(two), -noise), "bfloat16", 1.0
        )

    found = judge(*draws)
    assert found.allowed == found.differ == 96
    assert found.holds
    assert not judge(np.ones(96), np.zeros(96)).holds
