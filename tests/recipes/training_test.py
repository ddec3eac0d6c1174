"""grpo, sft and dpo: tiny jobs from their configs, their schedules, and what they refuse before
computing.
"""

import json
import runpy
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.errors import UserError
from mint_jax.recipes import rollouts
from tests.configs import run_config

CONFIGS = Path(__file__).parents[2] / "configs"


def tiny(job: str, **changes):
    config = runpy.run_path(str(CONFIGS / "tiny" / f"{job}.py"))["get_config"]()
    config.update(changes)
    return config


def only(config, *names):
    for name in list(config.policies):
        if name not in names:
            del config.policies[name]
    return config


def rewarding(score):
    """An environment of the user's own, ``module:factory`` in a config."""
    examples = [Example(f"{i} is", str(i)) for i in range(4)]
    return ListEnvironment(examples, examples[:2], score)


def rewards_length():
    return rewarding(lambda text, example: float(len(text) % 7))


def raises():
    return rewarding(lambda text, example: 1 / 0)


def returns_nan():
    return rewarding(lambda text, example: float("nan"))


def returns_text():
    return rewarding(lambda text, example: "good")


@pytest.fixture
def own_env(monkeypatch):
    """Makes a factory above reachable from a config; returns its name."""
    import sys
    import types

    def put(factory):
        module = types.ModuleType("own_rewards")
        module.make = factory  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "own_rewards", module)
        return "own_rewards:make"

    return put


@pytest.mark.long
def test_schedules_give_the_same_policies(own_env, tmp_path):
    results = {}
    for schedule, cohorts in (("sequential", 1), ("overlapped", 1), ("batched", 1), ("batched", 2)):
        config = only(tiny("grpo", schedule=schedule, cohorts=cohorts, steps=2), "ppo", "cispo")
        for policy in config.policies.values():
            policy.env.name = own_env(rewards_length)
            policy.optimizer.learning_rate = 1e-4
        workdir = tmp_path / f"{schedule}{cohorts}"
        result = run_config(config, workdir)
        with Catalog.open(workdir / "catalog") as catalog:
            results[schedule, cohorts] = {
                p["name"]: unpack(catalog.load(p["revision"]))[0] for p in result["policies"]
            }
            assert [catalog.resolve(p["name"]).digest for p in result["policies"]] == [
                p["revision"] for p in result["policies"]
            ]
        for p in result["policies"]:
            assert p["adapter_bytes"] > 0
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        assert sorted((r["step"], r["name"]) for r in rows) == [
            (s, n) for s in range(2) for n in ("cispo", "ppo")
        ]
        assert (workdir / "rewards.png").stat().st_size > 1000
    first = jax.tree.leaves(results["sequential", 1])
    assert any(np.abs(x).max() > 0 for x in first)
    for other in results.values():
        for a, b in zip(first, jax.tree.leaves(other)):
            # float32 sums in another order; Adam divides by the gradient's own size, so a step of
            # 1e-4 may differ in part
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(
    ("factory", "says"),
    [(raises, "division by zero"), (returns_nan, "nan"), (returns_text, "'good'")],
)
def test_a_bad_reward_names_policy_and_remedy(factory, says, own_env, tmp_path):
    config = only(tiny("grpo"), "ppo")
    config.policies.ppo.env.name = own_env(factory)
    with pytest.raises(UserError, match=says) as error:
        run_config(config, tmp_path)
    assert "ppo" in str(error.value)


@pytest.mark.parametrize("where", ["held out", "in training"])
def test_a_reward_that_hangs_ends_the_run_at_its_timeout(where, own_env, tmp_path, monkeypatch):
    monkeypatch.setattr("mint_jax.envs.scoring.LOOK_S", 0.1)
    monkeypatch.setattr("mint_jax.train.phases.LOOK_S", 0.1)
    release = threading.Event()
    examples = [Example(f"{i} is", "hangs" if where == "in training" else "") for i in range(4)]
    held_out = [Example("9 is", "hangs" if where == "held out" else "")]
    env = ListEnvironment(
        examples, held_out, lambda text, example: float(not example.answer or release.wait(120))
    )
    config = only(tiny("grpo", reward_timeout=0.5), "ppo")
    config.policies.ppo.env.name = own_env(lambda: env)
    try:
        says = r"has taken .*'ppo', completion .* of prompt '\d is'.*reward_timeout is 0\.5 s"
        with pytest.raises(UserError, match=says):
            run_config(config, tmp_path)
    finally:
        release.set()


@pytest.mark.parametrize(("setting", "value"), [("reward_workers", 0), ("reward_timeout", -1.0)])
def test_settings_of_rewards_are_checked_before_anything_is_done(setting, value, tmp_path):
    with pytest.raises(UserError, match=f"{setting} is {value}; expected"):
        run_config(tiny("grpo", **{setting: value}), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.adapter.update({"rank": 0}), "rank is 0"),
        (
            lambda p: p.adapter.update({"targets": ("q", "router")}),
            "'router' is not a projection.*choose from",
        ),
        (lambda p: p.loss.update({"kind": "grpo"}), "loss is 'grpo'; choose one of"),
        (lambda p: p.optimizer.update({"learning_rate": float("nan")}), "learning_rate is nan"),
        (lambda p: p.env.update({"name": "digits"}), "environment is 'digits'; choose one of"),
        (lambda p: p.sampling.update({"max_tokens": 512}), "exceed the context of 512"),
        (lambda p: p.sampling.update({"group_size": 1}), "at least 2 rollouts"),
        (lambda p: p.sampling.update({"temperature": 0.0}), "sampling.temperature is 0.0"),
        (lambda p: p.sampling.update({"top_p": 0.9}), "sampling.top_p is 0.9"),
        (lambda p: p.sampling.update({"normalisation": "mean"}), "normalisation is 'mean'"),
    ],
)
def test_a_bad_policy_is_refused_before_anything_is_sampled(change, says, tmp_path, monkeypatch):
    config = only(tiny("grpo"), "ppo")
    with config.unlocked():
        change(config.policies.ppo)
    monkeypatch.setattr(rollouts.Engine, "generate", lambda *a, **k: pytest.fail("sampled"))
    with pytest.raises(UserError, match=says):
        run_config(config, tmp_path)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("", "has no rows"),
        ('{"prompt": "a", "completion": "b"}\n', "held_out is 1 but .* has 1 rows"),
        ('{"prompt": "a", "completion": "b"}\nnot json\n', ":2 is not valid JSON"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n' * 20, "no assistant turn"),
    ],
)
def test_bad_supervised_data_is_refused(rows, says, tmp_path):
    (tmp_path / "rows.jsonl").write_text(rows)
    config = only(tiny("sft"), "adder")
    with config.unlocked():
        config.policies.adder.data = {"path": str(tmp_path / "rows.jsonl")}
    with pytest.raises(UserError, match=says):
        run_config(config, tmp_path / "work")


def test_sft_and_dpo_move_their_metric(tmp_path):
    result = run_config(tiny("sft"), tmp_path / "sft")
    for p in result["policies"]:
        assert p["loss_after"] < p["loss_before"] - 1.0
    rows = [{"prompt": "say", "chosen": " yes yes", "rejected": " no no"}] * 12
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = tiny("dpo")
    with config.unlocked():
        for policy in config.policies.values():
            policy.data = {"path": str(tmp_path / "pairs.jsonl")}
    result = run_config(config, tmp_path / "dpo")
    for p in result["policies"]:
        assert p["margin_before"] == 0.0
        assert p["margin_after"] > 0.05
        assert p["preferred_after"] == 1.0
    assert (tmp_path / "dpo" / "margin.png").is_file()


def test_no_policies_is_refused(tmp_path):
    with pytest.raises(UserError, match="policies is empty"):
        run_config(only(tiny("grpo")), tmp_path)
