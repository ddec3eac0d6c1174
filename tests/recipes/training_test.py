"""grpo, sft and dpo: tiny jobs, their schedules, and refusals before anything is computed."""

import json
import sys
import threading
import types
from collections import Counter

import jax
import numpy as np
import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.catalog.rollouts import unpack_rollouts
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.errors import UserError
from mint_jax.recipes import rollouts
from mint_jax.rollout import engine
from mint_jax.rollout.drafts import Drafts
from tests.configs import only, run_config, tiny
from tests.groups import rows_of


@pytest.fixture
def own_env(monkeypatch):
    """Makes an environment with these rewards reachable from a config; returns its name."""

    def put(score, examples=tuple(Example(f"{i} is", str(i)) for i in range(4)), held_out=None):
        module = types.ModuleType("own_rewards")
        env = ListEnvironment(list(examples), held_out or list(examples[:2]), score)
        module.make = lambda: env  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "own_rewards", module)
        return "own_rewards:make"

    return put


@pytest.mark.long
def test_schedules_give_the_same_policies(own_env, tmp_path):
    results = {}
    for schedule, cohorts in (("sequential", 1), ("overlapped", 1), ("batched", 1), ("batched", 2)):
        config = only(tiny("grpo", schedule=schedule, cohorts=cohorts, steps=2), "ppo", "cispo")
        for policy in config.policies.values():
            policy.env.name = own_env(lambda text, example: float(len(text) % 7))
            policy.optimizer.learning_rate = 1e-4
        workdir = tmp_path / f"{schedule}{cohorts}"
        result = run_config(config, workdir)
        with Catalog.open(workdir / "catalog") as catalog:
            for p in result["policies"]:
                assert catalog.resolve(p["name"]).digest == p["revision"]
            results[schedule, cohorts] = {
                p["name"]: unpack(catalog.load(p["revision"]))[0] for p in result["policies"]
            }
        expected = [(s, n) for s in range(2) for n in ("cispo", "ppo")]
        assert sorted((r["step"], r["name"]) for r in rows_of(workdir)) == expected
        assert (workdir / "rewards.png").stat().st_size > 1000
    first = jax.tree.leaves(results["sequential", 1])
    assert any(np.abs(x).max() > 0 for x in first)
    for other in results.values():
        for a, b in zip(first, jax.tree.leaves(other)):
            # float32 sums in another order; Adam divides by the gradient's own size, so a step of
            # 1e-4 may differ in part
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.long
def test_a_student_comes_near_its_teacher_and_its_rewards_do_not_matter(own_env, tmp_path):
    teacher = only(tiny("sft", steps=8, catalog=str(tmp_path / "catalog")), "bracket")
    teacher.policies.bracket.optimizer.learning_rate = 0.02
    run_config(teacher, tmp_path / "teacher")
    made, far = [], []
    for name, reward in (("student", 0.0), ("other", 1.0)):
        config = only(tiny("grpo", steps=24, catalog=teacher.catalog), "cispo")  # of rank 4
        policy = config.policies.cispo
        policy.env.name = own_env(lambda text, example, reward=reward: reward * len(text))
        policy.loss = {"kind": "ppo", "kl_kind": "k1", "kl": 1.0, "reference": "bracket@latest"}
        policy.sampling.update({"prompts": 4, "group_size": 8})
        with config.unlocked():
            policy.sampling.reward_weight = 0.0
            config.policies = {name: policy}
        policy.seed, policy.optimizer.learning_rate = 7, 0.01
        result = run_config(config, tmp_path / name)
        far.append([row["kl"] for row in rows_of(tmp_path / name)])
        made.append(result["policies"][0]["revision"])
    with Catalog.open(tmp_path / "catalog") as catalog:
        one, two = (jax.tree.leaves(unpack(catalog.load(digest))[0]) for digest in made)
    assert np.mean(far[0][-6:]) < 0.75 * np.mean(far[0][:6])  # 0.29 of 0.46 nats
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    policy.loss.kl = 0.0
    with pytest.raises(UserError, match="reward_weight is 0, and loss has no KL"):
        run_config(config, tmp_path / "nothing")


@pytest.mark.parametrize("where", ["held out", "in training"])
def test_a_reward_that_hangs_ends_the_run_at_its_timeout(where, own_env, tmp_path, monkeypatch):
    monkeypatch.setattr("mint_jax.envs.scoring.LOOK_S", 0.1)
    monkeypatch.setattr("mint_jax.train.phases.LOOK_S", 0.1)
    release = threading.Event()
    examples = [Example(f"{i} is", "hangs" if where == "in training" else "") for i in range(4)]
    held_out = [Example("9 is", "hangs" if where == "held out" else "")]
    config = only(tiny("grpo", reward_timeout=0.5), "ppo")
    hangs = lambda text, example: float(not example.answer or release.wait(120))  # noqa: E731
    config.policies.ppo.env.name = own_env(hangs, examples, held_out)
    try:
        says = r"has taken .*'ppo', completion .* of prompt '\d is'.*reward_timeout is 0\.5 s"
        with pytest.raises(UserError, match=says):
            run_config(config, tmp_path)
    finally:
        release.set()


HANGS = """
import re
from mint_jax.envs.env import Example, ListEnvironment

def make():
    examples = [Example(f"{i} is", "") for i in range(4)]

    def reward(text, example):  # some hang, with the lock of the interpreter
        hangs = sum(map(ord, text)) % 3 == 0
        return float(bool(re.match("(a+)+b", "a" * 60))) if hangs else len(text) / 8

    return ListEnvironment(examples, examples[:2], reward)
"""


@pytest.mark.long
def test_a_reward_that_hangs_costs_its_row_where_processes_compute_it(tmp_path, monkeypatch):
    (tmp_path / "own_hanging.py").write_text(HANGS)
    monkeypatch.syspath_prepend(tmp_path)
    config = only(tiny("grpo", reward_timeout=0.5, steps=2), "ppo")
    with config.unlocked():
        config.reward_processes = 2
    config.policies.ppo.env.name = "own_hanging:make"
    config.policies.ppo.sampling.update({"prompts": 4, "group_size": 4})
    result = run_config(config, tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert any(row.get("given_up", 0) > 0 for row in rows)
    assert all(0 <= row["reward"] < 8 for row in rows)
    with Catalog.open(tmp_path / "run" / "catalog") as catalog:
        assert catalog.resolve("ppo").digest == result["policies"][0]["revision"]
        kept = unpack_rollouts(catalog.load_payload(catalog.rollouts("ppo", 1)[0].digest))
    assert np.isnan(kept.rewards).mean() == rows[-1].get("given_up", 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"adapter": {"targets": ("q", "router")}}, "'router' is not a projection.*choose from"),
        ({"loss": {"kind": "grpo"}}, "loss is 'grpo'; choose one of"),
        ({"loss": {"kind": "reinforce"}}, "max_staleness is 1, but policies.ppo.loss.kind is 're"),
        ({"sampling": {"temperature": 0.0}}, "sampling: temperature is 0.0"),
        ({"rollout_revision": "ppo@1"}, "partial_rollouts is True, but .*'ppo@1'.*drop one"),
    ],
)
def test_a_bad_policy_is_refused_before_anything_is_sampled(change, says, tmp_path, monkeypatch):
    config = only(tiny("grpo"), "ppo")
    with config.unlocked():
        config.policies.ppo.unlock()
        config.policies.ppo.update(change)
        config.max_staleness, config.partial_rollouts = 1, True
    monkeypatch.setattr(rollouts.Engine, "generate", lambda *a, **k: pytest.fail("sampled"))
    with pytest.raises(UserError, match=says):
        run_config(config, tmp_path)


def test_partial_rollouts_need_an_update_before_their_own():
    with pytest.raises(UserError, match=r"max_staleness is 0, so that no .*set max_staleness to 1"):
        run_config(tiny("grpo", partial_rollouts=True), "unused")


def test_sft_and_dpo_move_their_metric(tmp_path):
    result = run_config(tiny("sft"), tmp_path / "sft")
    for p in result["policies"]:
        assert p["loss_after"] < p["loss_before"] - 1.0
    row = json.dumps({"prompt": "say", "chosen": " yes yes", "rejected": " no no"})
    (tmp_path / "pairs.jsonl").write_text(f"{row}\n" * 12)
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


@pytest.mark.long
def test_drafts_change_no_revision(tmp_path, monkeypatch):
    """The last completions of a prompt are drafts for the next, in training and in evaluation."""
    counts, drew = Counter[str](), Drafts.drew

    def counted(self, sample, new):
        counts.update(found := drew(self, sample, new))
        return found

    monkeypatch.setattr(Drafts, "drew", counted)
    found = []
    for drafts in (0, 3):
        config = tiny("grpo", steps=2, max_rows=48, speculative_tokens=drafts)
        for policy in config.policies.values():
            policy.sampling.max_tokens = 12
        # one program in both runs: others round differently
        monkeypatch.setattr(engine, "ROWS", ())
        result = run_config(config, tmp_path / str(drafts))
        found.append([(p["revision"], p["reward_after"]) for p in result["policies"]])
    assert found[0] == found[1]
    assert 0 < counts["accepted_given"] < counts["drafted_given"]
