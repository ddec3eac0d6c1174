"""The GRPO job: what a policy computes is its own, whoever else trains and wherever the run was
interrupted.
"""

import runpy
import sys
import threading
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.data.order import epoch_indices
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.harness import start
from mint_jax.recipes import grpo, mismatch, rollouts
from mint_jax.recipes.options import GrpoSampling
from mint_jax.rollout.active import ActiveRequests
from mint_jax.rollout.request import Completion
from tests.configs import run_config

pytestmark = pytest.mark.bits

CONFIG = Path(__file__).parents[2] / "configs" / "tiny" / "grpo.py"
WAIT_S = 300


def tiny(policies: dict, **changes):
    """The tiny config with these policies, whose sections are changes of its first."""
    config = runpy.run_path(str(CONFIG))["get_config"]()
    config.update({"tensorboard": False, "export_every": 1, **changes})
    usual = config.policies.ppo.to_dict()
    with config.unlocked():
        config.policies = {
            name: usual | {"env": {"name": "own_rewards:make"}} | change
            for name, change in policies.items()
        }
    return config


@pytest.fixture
def lengths(monkeypatch):
    """Prompts of the lengths that ``lengths[policy]`` lists, in the order of the steps; a prompt is
    its length, spelled out.
    """
    wanted: dict[str, list[int]] = {}
    monkeypatch.setattr(
        start,
        "encode",
        lambda base, prompt: (
            np.random.default_rng(int(prompt)).integers(3, 200, int(prompt)).tolist()
        ),
    )

    def make(policy):
        mine = wanted[policy]
        order = epoch_indices(len(mine), len(mine), start.policy_seed(0, policy), 0)
        placed = dict(zip(order, mine))
        examples = [Example(str(placed[i]), "") for i in range(len(mine))]
        return ListEnvironment(
            examples, [Example("9", "")], lambda text, example: float(len(text) % 7)
        )

    module = types.ModuleType("own_rewards")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_rewards", module)
    return wanted


@pytest.fixture
def sampled(monkeypatch):
    """``(policies, step)`` and what each call of the device has of its rollout: rows of the
    program, rows in use, tokens so far.
    """
    seen: dict[tuple, list] = {}
    now = [("evaluation",)]
    rollout, decode = grpo.ConcurrentGrpo.rollout, ActiveRequests._decode

    def watched_rollout(self, names, step):
        now[0] = (*names, step)
        out = rollout(self, names, step)
        now[0] = ("evaluation",)
        return out

    def watched_decode(self, running, rows):
        seen.setdefault(now[0], []).append((rows, len(running), sum(s.own for s, _ in running)))
        return decode(self, running, rows)

    monkeypatch.setattr(grpo.ConcurrentGrpo, "rollout", watched_rollout)
    monkeypatch.setattr(ActiveRequests, "_decode", watched_decode)
    return seen


def section(name, max_tokens, **changes):
    sampling = {"prompts": 1, "group_size": 2, "max_tokens": max_tokens}
    return {"env": {"name": "own_rewards:make", "policy": name}, "sampling": sampling, **changes}


def revisions(result):
    return {p["name"]: p["revision"] for p in result["policies"]}


@pytest.mark.long
@pytest.mark.users  # the last bits of a rollout
def test_another_policy_beside_it_changes_nothing_of_a_policy_s_run(lengths, sampled, tmp_path):
    lengths.update({"b": [28, 22], "a": [24, 30], "z": [26, 24]})
    alone = run_config(
        tiny({"b": section("b", 8)}, schedule="sequential", steps=2), tmp_path / "alone"
    )
    shapes = {key: sampled[key] for key in (("b", 0), ("b", 1))}
    sampled.clear()
    names = {"a": 9, "b": 8, "z": 8}
    among = run_config(
        tiny(
            {n: section(n, tokens) for n, tokens in names.items()}, schedule="sequential", steps=2
        ),
        tmp_path / "among",
    )
    assert {key: sampled[key] for key in shapes} == shapes
    assert revisions(among)["b"] == revisions(alone)["b"]
    assert len(set(revisions(among).values())) == 3


@pytest.mark.long
def test_an_overlapped_run_resumed_is_the_run_uninterrupted(
    lengths, sampled, tmp_path, monkeypatch
):
    """At the checkpoint two rollouts are under way. Done again, each is what it was."""
    lengths.update({"a": [28, 22], "b": [16, 16], "c": [100, 24]})
    # whose reward waits for whose rollout: a checkpoint is due with b's first update, while second
    # rollouts of a and c are out
    waits = {
        ("a", 0): ("c", 0),
        ("c", 0): ("a", 1),
        ("b", 0): ("c", 1),
        ("a", 1): ("b", 1),
        ("c", 1): ("b", 1),
    }
    begun = {}
    rollout, reward, update = (
        grpo.ConcurrentGrpo.rollout,
        grpo.ConcurrentGrpo.reward,
        grpo.ConcurrentGrpo.update,
    )
    order, interrupt = [], [False]

    def gated_rollout(self, names, step):
        out = rollout(self, names, step)
        order.append(("rollout", names[0], step))
        for r in out.values():
            r.step = step
        begun.setdefault((names[0], step), threading.Event()).set()
        return out

    def gated_reward(self, name, drawn):
        gate = waits.get((name, drawn.step))
        assert gate is None or begun.setdefault(gate, threading.Event()).wait(WAIT_S), (
            f"{name} {drawn.step} waited for {gate}"
        )
        return reward(self, name, drawn)

    def counted_update(self, scored):
        (name,) = scored
        if interrupt[0] and scored[name][0].step == 1:
            raise ZeroDivisionError("the run is interrupted")
        order.append(("update", name, scored[name][0].step))
        return update(self, scored)

    for name, function in {
        "rollout": gated_rollout,
        "reward": gated_reward,
        "update": counted_update,
    }.items():
        monkeypatch.setattr(grpo.ConcurrentGrpo, name, function)

    def run(workdir):
        begun.clear()
        order.clear()
        sampled.clear()
        config = tiny(
            {"a": section("a", 8), "b": section("b", 8), "c": section("c", 9)},
            schedule="overlapped",
            steps=2,
        )
        config.checkpoint.every = 1
        config.reward_workers = 3
        return revisions(run_config(config, workdir))

    whole = run(tmp_path / "whole")
    shapes = dict(sampled)
    interrupt[0] = True
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "parts")
    at = order.index(("update", "b", 0))
    assert {("rollout", "a", 1), ("rollout", "c", 1)} <= set(order[:at]), (
        "their rollouts are under way at the checkpoint"
    )
    assert not {("update", "a", 1), ("update", "c", 1)} & set(order)
    interrupt[0] = False
    assert run(tmp_path / "parts") == whole
    assert {step for _, _, step in order} == {1}, "it resumed from the checkpoint"
    assert {key: sampled[key] for key in sampled if key[-1] == 1} == {
        key: shapes[key] for key in shapes if key[-1] == 1
    }


def test_metrics_of_rollouts():
    def drawn(tokens, finish):
        return Completion(
            list(range(tokens)), [0.0] * tokens, [-0.5 * (tokens + 1)] * tokens, finish, ""
        )

    completions = [
        [drawn(1, "stop"), drawn(3, "length")],
        [drawn(2, "stop"), drawn(2, "stop")],
        [drawn(4, "length"), drawn(4, "length")],
    ]
    rollout = rollouts.Rollout([], [], completions)
    rewards = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    without_baseline = rollouts.rollout_metrics(GrpoSampling(baseline="none"), rollout, rewards)
    assert without_baseline["zero_advantage"] == pytest.approx(1 / 3), (
        "there equal rewards are advantages, unless they are 0"
    )
    assert rollouts.rollout_metrics(GrpoSampling(), rollout, rewards) == pytest.approx(
        {
            "reward": 2 / 6,
            "reward_std": 0.5 / 3,
            "completion_tokens": 16 / 6,
            "sampled_tokens": 16,
            "truncated": 3 / 6,
            "zero_advantage": 2 / 3,
            "entropy": (1 * 1.0 + 3 * 2.0 + 4 * 1.5 + 8 * 2.5) / 16,
        }
    )


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"trainer_dtype": "float32"}, None),
        ({"trainer_dtype": "bfloat16"}, ("bfloat16", "int8")),
        ({"trainer_quantise": "int8"}, None),
        ({"trainer_quantise": ""}, ("float32", "")),
    ],
)
def test_a_trainer_whose_base_is_stored_otherwise_has_one_of_its_own(monkeypatch, settings, own):
    sampler: Any = types.SimpleNamespace(
        dtype=jnp.dtype("float32"), mesh=None, cfg=types.SimpleNamespace(kernels=None), name="base"
    )
    loads = []

    def load(name, mesh, dtype, *, quantise, kernels):
        loads.append((dtype, quantise))
        return types.SimpleNamespace(nbytes=0)

    monkeypatch.setattr(mismatch.base_lib, "load", load)
    usual = {"trainer_dtype": "", "trainer_quantise": None, "router_noise": 0.0}
    config: Any = types.SimpleNamespace(
        **{"base": "b", "dtype": "float32", "quantise": "int8"} | usual | settings
    )
    found = mismatch.trainer_base(sampler, config)
    assert ((found is sampler), loads) == ((own is None), [own] * (own is not None))
