"""A policy's run is its own, whichever other policies train."""

import sys
import types

import numpy as np
import pytest

from mint_jax.data.order import epoch_indices
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.harness import start
from tests.configs import run_config, tiny

pytestmark = pytest.mark.bits

# lengths of each policy's prompts, in the order of the steps
LENGTHS = {"b": [28, 22], "a": [24, 30], "z": [26, 24]}


@pytest.fixture(autouse=True)
def own_rewards(monkeypatch):
    """Prompts of these lengths, as an environment; a prompt is its length, spelled out."""

    def encode(base, prompt, variables):
        return np.random.default_rng(int(prompt)).integers(3, 200, int(prompt)).tolist()

    def make(policy):
        wanted = LENGTHS[policy]
        order = epoch_indices(len(wanted), len(wanted), start.policy_seed(0, policy), 0)
        placed = dict(zip(order, wanted))
        examples = [Example(str(placed[i]), "") for i in range(len(wanted))]
        held_out = [Example("9", "")]
        return ListEnvironment(examples, held_out, lambda text, example: float(len(text) % 7))

    monkeypatch.setattr(start, "encode", encode)
    module = types.ModuleType("own_rewards")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_rewards", module)


def revisions(folder, max_tokens: dict[str, int]) -> dict[str, str]:
    """Returns the final revision of each policy after two steps one by one."""
    config = tiny("grpo", tensorboard=False, export_every=1, schedule="sequential", steps=2)
    usual = config.policies.ppo.to_dict()
    with config.unlocked():
        config.policies = {
            name: usual
            | {"env": {"name": "own_rewards:make", "policy": name}}
            | {"sampling": {"prompts": 1, "group_size": 2, "max_tokens": most}}
            for name, most in max_tokens.items()
        }
    return {p["name"]: p["revision"] for p in run_config(config, folder)["policies"]}


@pytest.mark.long
@pytest.mark.users  # the last bits of a rollout
def test_other_policies_change_nothing_of_a_policys_run(tmp_path):
    alone = revisions(tmp_path / "alone", {"b": 8})
    among = revisions(tmp_path / "among", {"a": 9, "b": 8, "z": 8})
    assert among["b"] == alone["b"]
    assert len(set(among.values())) == 3
