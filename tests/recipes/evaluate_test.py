"""evaluate: scores that name what produced them, and the refusal of scores that a shared batch does
not give back.
"""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from mint_jax import mesh
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from mint_jax.envs.env import Example, ListConversation, ListEnvironment, StepResult
from mint_jax.errors import UserError
from mint_jax.harness.adapters import AdapterSource
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.recipes import evaluate
from mint_jax.residency import pool
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests.configs import only, read, run_config, tiny


def make():
    """An environment whose reward differs between any two completions."""
    return ListEnvironment(EXAMPLES, EXAMPLES[:6], reward_of)


def reward_of(text, example):
    return sum(map(ord, text)) % 11 / 11


EXAMPLES = [Example(f"{i * 7919} is", str(i)) for i in range(12)]


def play():
    """A conversation of four turns, whose rewards differ as those of ``make``."""

    def answer(texts, example):
        return StepResult(" so", reward_of(texts[-1], example), len(texts) == 4)

    return ListConversation(EXAMPLES, EXAMPLES[:6], answer)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    """Policies ``one`` (rank 5) and ``two`` (rank 8) over tiny-random, whose random factors change
    most tokens.
    """
    place, rng = tmp_path_factory.mktemp("catalog"), np.random.default_rng(0)
    base = base_lib.load("tiny-random", mesh.make_mesh({"data": 1}, jax.devices()[:1]))
    draw = lambda s: rng.normal(size=s.shape, scale=0.3).astype(np.float32)  # noqa: E731
    with Catalog.open(place) as opened:
        for name, rank in (("one", 5), ("two", 8)):
            config = AdapterConfig(rank, 2.0 * rank)
            shapes = lora_tree.adapter_specs(transformer.abstract(base.cfg), config)
            data = pack(jax.tree.map(draw, shapes), Schema(base.fingerprint, config))
            opened.export(name, data, 1, create=True)
    return place


def config_of(catalog, **fields) -> ConfigDict:
    settings = {"job": "evaluate", "base": "tiny-random", "mesh": {"data": 1}, "seed": 3}
    settings |= {"catalog": str(catalog), "examples": 6, "samples": 4, "max_rows": 16}
    settings |= {"adapters": {"base": "", "one": "one@latest", "two": "two@1"}}
    settings |= {"sampling": {"max_tokens": 4, "temperature": 1.0}}
    settings |= {"env": {"name": "tests.recipes.evaluate_test:make"}}
    return ConfigDict(settings | fields)


@pytest.mark.long
def test_a_score_is_recorded_with_everything_that_produced_it(catalog, tmp_path):
    result = run_config(config_of(catalog), tmp_path)
    rows = {row["name"]: row for row in result["results"]}
    assert len({row["reward"] for row in rows.values()}) == 3, "the adapters do not differ"
    about = "base", "seed", "renderer", "scorer", "dataset"
    with Catalog.open(catalog) as opened:
        for name in ("one", "two"):
            (score,), row = opened.evaluations(name), rows[name]
            assert score.digest == opened.resolve(name).digest == row["revision"]
            assert [getattr(score, key) for key in about] == [result[key] for key in about]
            assert score.isolated == score.shared
            assert round(score.shared, 4) == row["reward"]
            assert score.metrics["rows"] == 24
            assert score.metrics["sampling"]["max_tokens"] == 4
    other = run_config(config_of(catalog, examples=5, adapters={"base": "", "same": ""}), tmp_path)
    assert other["dataset"] != result["dataset"]
    assert (other["renderer"], other["scorer"]) == (result["renderer"], result["scorer"])
    assert other["results"][0]["reward"] == other["results"][1]["reward"]


@pytest.mark.long
@pytest.mark.parametrize(("env", "turns"), [("make", {}), ("play", {"max_turns": 3})])
def test_a_revision_is_sampled_as_it_was_trained_unless_set_otherwise(tmp_path, env, turns):
    """The held-out reward that training reported comes out again."""
    config = only(tiny("grpo", steps=1, eval={"examples": 6, "samples": 4}), "ppo")
    policy = config.policies.ppo
    policy.env.name = f"tests.recipes.evaluate_test:{env}"
    policy.optimizer.learning_rate = 0.1
    policy.sampling = {"prompts": 2, "group_size": 2, "max_tokens": 11, "stop": ("e",)} | turns
    [trained] = run_config(config, tmp_path / "grpo")["policies"]
    catalog = tmp_path / "grpo" / "catalog"

    def rows(**sampling):
        fields = {"adapters": {"base": "", "ppo": "ppo@latest"}, "seed": 0, "sampling": sampling}
        fields["env"] = {"name": policy.env.name}
        return run_config(config_of(catalog, **fields), tmp_path / "work")["results"]

    base, ppo = rows()
    assert (base["reward"], ppo["reward"]) == (trained["reward_before"], trained["reward_after"])
    assert base["reward"] != ppo["reward"], "nothing was learned"
    wanted = {"max_tokens": 11, "temperature": 1.0, "stop": ("e",)} | turns
    assert base["sampling"] == ppo["sampling"] == wanted
    assert rows(max_tokens=3)[1]["sampling"] == wanted | {"max_tokens": 3}
    with Catalog.open(catalog) as opened:
        recorded = opened.revision("ppo", "latest").sampling
    assert recorded == wanted | {"stop": ["e"]}


def serve_wrong(patch):
    """Batches of several adapters serve each under the next one's name."""
    right = pool.Pool.hold

    @contextlib.contextmanager
    def hold(self, names, following=()):
        with right(self, names, following) as held:
            slots = list(held.slots.values())
            yield dataclasses.replace(held, slots=dict(zip(held.slots, slots[1:] + slots[:1])))

    patch.setattr(pool.Pool, "hold", hold)


REFUSED = r"'one' \(one@latest\): .* shared batch are off by .* loaded alone,.*nothing is recorded"


@pytest.mark.long
def test_a_score_of_conversations_is_that_of_playing_by_hand(catalog, tmp_path):
    """Greedy turns of one adapter alone, one after another."""
    names = {"base": "", "one": "one@latest"}
    drawing = {"max_tokens": 5, "temperature": 0.0, "max_turns": 3}
    env = {"name": "tests.recipes.evaluate_test:play"}
    config = config_of(catalog, adapters=names, sampling=drawing, env=env, samples=1, examples=3)
    rows = run_config(config, tmp_path)["results"]
    base = base_lib.load("tiny-random", mesh.make_mesh({"data": 1}, jax.devices()[:1]))
    tokenizer, task, scores = base.need_tokenizer(), play(), []
    engine = Engine(base, tokenizer.decode, max_rows=16)
    with evaluate.catalog_of(read(config)) as opened:
        for name in names.values():
            total = 0.0
            alone = pool.Pool(base, AdapterSource(base, opened), [name] if name else [], 1)
            with alone, alone.hold([name]) as held:
                for example in task.held_out[:3]:
                    ids, texts = tokenizer.encode(example.messages), []
                    for _ in range(3):
                        how = {"stop_ids": tokenizer.eos_ids, "temperature": 0.0}
                        request = Request(tuple(ids), held.slot(name), max_tokens=5, **how)
                        [[turn]] = engine.generate([request], held.stacks)
                        texts.append(turn.text)
                        found = task.step(texts, example)
                        ids += [*turn.tokens, *tokenizer.encode(found.observation, special=False)]
                        total += found.reward
            scores.append(round(total / 3, 4))
    assert [row["reward"] for row in rows] == scores
    assert scores[0] != scores[1], "the adapters do not differ"


@pytest.mark.long
@pytest.mark.parametrize("env", ["make", "play"])
def test_a_shared_batch_that_serves_another_adapter_is_refused(catalog, tmp_path, monkeypatch, env):
    serve_wrong(monkeypatch)
    with Catalog.open(catalog) as opened:
        before = [opened.evaluations(name) for name in ("one", "two")]
        config = config_of(catalog, env={"name": f"tests.recipes.evaluate_test:{env}"})
        with pytest.raises(UserError, match=REFUSED):
            run_config(config, tmp_path)
        assert [opened.evaluations(name) for name in ("one", "two")] == before


def test_the_rule():
    def errors(size, worst=None):
        rows = [np.full(3, size) for _ in range(40)]
        return rows if worst is None else [np.full(3, worst), *rows[1:]]

    def holds(noise, rows, dtype):
        found = evaluate.check({"": errors(noise), "one": rows}, dtype)
        assert found[""].holds
        return found["one"].holds

    for noise, dtype in ((0.0, "float32"), (0.03, "bfloat16")):
        least = max(noise, evaluate.LEAST[dtype])
        assert holds(noise, errors(7.9 * least), dtype)
        # one row alone
        assert not holds(noise, errors(noise, 8.1 * least), dtype)
        assert not holds(noise, errors(np.nan), dtype)
