"""Learning on a sparse base: a tiny model with latent attention and experts is pretrained, then
GRPO trains LoRA on its experts.
"""

import runpy
from pathlib import Path

import pytest

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from tests.configs import run_config

CONFIGS = Path(__file__).parents[2] / "configs" / "tiny"


def config_of(name, **changes):
    config = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    for key, value in changes.items():
        config[key] = value
    return config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The result of the pretraining config, as it stands."""
    return run_config(config_of("pretrain_moe"), tmp_path_factory.mktemp("pretrained"))


@pytest.mark.long
def test_the_base_is_a_checkpoint_that_learned(made, mesh):
    assert made["loss_after"] < 0.5 * made["loss_before"]
    base = base_lib.load(made["base"], mesh)
    assert base.cfg.stacks == {"dense": 1, "moe": 2}
    assert base.cfg.latent is not None
    text = "2 or 9: 9\n~ {x}"
    tokenizer = Tokenizer(made["base"])
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow  # two whole trainings; what is exact about replay is told by train/replay_test.py
def test_rewards_rise_on_experts_whose_router_differs_and_replay_narrows_the_gap(made, tmp_path):
    """Router weights of trainer and sampler differ: replay takes the choice out of the gap, and
    leaves the weights of what was chosen.

    Of learning without replay nothing is asked: at this noise and size it learned as much (the
    table is in docs/numbers.md).
    """
    results = {}
    for replay in (True, False):
        config = config_of("grpo_moe", base=made["base"], router_noise=0.3)
        for policy in config.policies.values():
            policy.sampling.replay = replay
        results[replay] = {
            p["name"]: p for p in run_config(config, tmp_path / str(replay))["policies"]
        }
    gain = {name: p["reward_after"] - p["reward_before"] for name, p in results[True].items()}
    # held-out rewards of 27 prompts x 4 samples: a standard error of about 0.04
    assert gain["experts"] > 0.1
    assert gain["everything"] > 0.15
    for name, p in results[True].items():
        assert 0 < p["gap"] < results[False][name]["gap"]
        assert p["out_of_route"] > 0.01


def test_bad_requests_are_refused(tmp_path):
    (tmp_path / "made" / "base").mkdir(parents=True)
    with pytest.raises(UserError, match="exists: remove it"):
        run_config(config_of("pretrain_moe"), tmp_path / "made")
    with pytest.raises(UserError, match="plain text in ASCII"):
        run_config(config_of("pretrain_moe", envs=({"name": "copy_word"},)), tmp_path)
    with pytest.raises(UserError, match="has no experts"):
        run_config(config_of("grpo", router_noise=0.1), tmp_path / "dense")
