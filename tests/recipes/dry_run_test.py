"""``--dry_run`` against what the job then takes."""

import json
from pathlib import Path

import jax
import pytest

from mint_jax import launch, mesh, params
from mint_jax.harness import start
from mint_jax.models import base as base_lib
from mint_jax.train.trainer import Trainer
from tests.configs import load

TINY = Path(__file__).parents[2] / "configs" / "tiny" / "grpo.py"


def dry_run(capsys, *options: str) -> dict:
    launch.main([f"--config={TINY}", "--dry_run", *options])
    return json.loads(capsys.readouterr().out)


def test_bytes_are_those_of_the_base_and_the_trainer(capsys, tmp_path):
    base = base_lib.load("tiny-random", mesh.make_mesh({"data": 1}, jax.devices()[:1]), "bfloat16")
    change = "--config.policies.ppo.adapter.rank=7"
    said = dry_run(capsys, "--config.dtype=bfloat16", change, f"--workdir={tmp_path / 'work'}")
    config = load("configs/tiny/grpo.py", change)
    policies = [start.policy_config(n, section, 0) for n, section in config.policies.items()]
    trainer = Trainer(base, policies)
    state = params.nbytes(trainer.state)
    revisions = {name: params.nbytes(trainer.adapter(name)) for name in config.policies}
    assert said["bytes"]["devices"] == {"base": base.nbytes, "policies_in_training": state}
    assert said["bytes"]["disk"] == {"checkpoint": state, "revision": revisions}
    assert said["config"]["policies"]["ppo"]["adapter"]["rank"] == 7
    assert said["config"]["max_rows"] == config.max_rows
    assert said["runs"].startswith("mint_jax.recipes.grpo: Concurrent GRPO")
    assert not (tmp_path / "work").exists()


def test_a_base_that_is_not_here_is_not_fetched(capsys, monkeypatch):
    monkeypatch.setattr(base_lib, "resolve", lambda name: pytest.fail("fetched"))
    said = dry_run(capsys, "--config.base=somebody/something")
    assert said["bytes"] is None
    assert "somebody/something" in said["why"]
