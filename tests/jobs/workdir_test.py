"""Whose a workdir is: a start that fails before its first step holds nothing, one with steps is
another config's no more.
"""

import json
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from mint_jax.errors import UserError
from mint_jax.jobs import common, settings, sft


def config_of(**changes) -> ConfigDict:
    policies = {"adder": {"data": {"env": "digit_sum"}, "adapter": {"rank": 2}}}
    return settings.complete(
        ConfigDict(
            {"job": "sft", "base": "tiny-random", "steps": 1, "policies": policies} | changes
        )
    )


def saved(workdir: Path) -> dict:
    return json.loads((workdir / "config.json").read_text())


def test_a_start_that_failed_does_not_hold_the_workdir(tmp_path):
    with pytest.raises(UserError, match="needs 8 devices"):
        sft.run(config_of(mesh={"data": 1, "tensor": 8}), tmp_path)
    (tmp_path / "run.json").write_text(
        json.dumps({"id": "me", "start": {"default/adder": {"digest": "0"}}, "fixed": {}})
    )
    common.claim_workdir(config_of(), tmp_path)
    assert saved(tmp_path)["mesh"]["tensor"] == 1
    assert json.loads((tmp_path / "run.json").read_text()) == {"id": "me"}, (
        "where policies began was the other config's"
    )


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step_1"])
def test_steps_are_their_configs(tmp_path, left):
    common.claim_workdir(config_of(), tmp_path)
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("{}\n")
    (tmp_path / "run.json").write_text('{"id": "me", "start": {}}')
    with pytest.raises(
        UserError, match="holds a run with seed=0, this one has 7: choose another --workdir"
    ):
        common.claim_workdir(config_of(seed=7), tmp_path)
    assert saved(tmp_path)["seed"] == 0
    common.claim_workdir(config_of(steps=9), tmp_path)
    assert saved(tmp_path)["steps"] == 9
    assert json.loads((tmp_path / "run.json").read_text()) == {"id": "me", "start": {}}


def test_a_config_saved_before_a_setting_existed_has_its_default(tmp_path):
    common.claim_workdir(config_of(), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    old = saved(tmp_path)
    for name in ("quantise", "payloads", "remat", "checkpoint", "mesh"):
        del old[name]
    del old["policies"]["adder"]["optimizer"]
    (tmp_path / "config.json").write_text(json.dumps(old | {"gone": 3}))
    with pytest.raises(UserError, match="gone=3"):
        common.claim_workdir(config_of(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(old))
    common.claim_workdir(config_of(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match="remat='names', this one has 'full'"):
        common.claim_workdir(config_of(remat="full"), tmp_path)


def test_a_workdir_that_cannot_be_written_is_refused_before_the_base_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(common, "open_base", lambda config: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        sft.run(config_of(), tmp_path / "file" / "work")
