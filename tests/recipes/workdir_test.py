"""A start that fails before its first step leaves the workdir free; steps keep their config."""

import json
from pathlib import Path

import pytest

from mint_jax.errors import UserError
from mint_jax.harness import start, workdir
from mint_jax.recipes.options import SftSettings, read
from tests.configs import run_config


def config_of(**changes) -> SftSettings:
    policies = {"adder": {"data": {"env": "digit_sum"}, "adapter": {"rank": 2}}}
    return read({"job": "sft", "base": "tiny-random", "steps": 1, "policies": policies} | changes)


def saved(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_start_that_failed_does_not_hold_the_workdir(tmp_path):
    with pytest.raises(UserError, match="needs 8 devices"):
        run_config(config_of(mesh={"data": 1, "tensor": 8}), tmp_path)
    (tmp_path / "run.json").write_text(
        json.dumps({"id": "me", "start": {"default/adder": {"digest": "0"}}, "fixed": {}})
    )
    workdir.claim(config_of(), tmp_path)
    assert saved(tmp_path)["mesh"]["tensor"] == 1
    assert json.loads((tmp_path / "run.json").read_text()) == {"id": "me"}, (
        "where policies began was the other config's"
    )


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step_1"])
def test_steps_are_their_configs(tmp_path, left):
    workdir.claim(config_of(), tmp_path)
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("{}\n")
    (tmp_path / "run.json").write_text('{"id": "me", "start": {}}')
    with pytest.raises(
        UserError, match="holds a run with seed=0, this one has 7: choose another --workdir"
    ):
        workdir.claim(config_of(seed=7), tmp_path)
    assert saved(tmp_path)["seed"] == 0
    workdir.claim(config_of(steps=9), tmp_path)
    assert saved(tmp_path)["steps"] == 9
    assert json.loads((tmp_path / "run.json").read_text()) == {"id": "me", "start": {}}


def test_a_workdir_that_cannot_be_written_is_refused_before_the_base_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(start, "open_base", lambda config: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run_config(config_of(), tmp_path / "file" / "work")
