"""The conversion job: a base that other jobs, adapters and the dry run take as their checkpoint."""

import fcntl
import json
from pathlib import Path

import pytest

from mint_jax.errors import UserError
from mint_jax.models.outline import outline
from mint_jax.recipes import dry_run
from tests import configs
from tests.recipes.inference_test import config_of


def test_other_jobs_take_a_conversion_as_their_base(hf_dirs, tmp_path, capsys):
    source, output = str(hf_dirs("llama_tied")), str(tmp_path / "base")
    convert = config_of("convert", base=source, output=output, mesh={"fsdp": 2})
    with open(tmp_path / "base.lock", "w") as held:  # as another process's
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=f"another process converts a base to {output}"):
            configs.run_config(convert, tmp_path / "convert")
    assert not Path(output).exists()
    result = configs.run_config(convert, tmp_path / "convert")
    assert not (tmp_path / "base.lock").exists()
    assert result["bytes"] > 0
    assert "converting base" in capsys.readouterr().err
    assert outline(output).fingerprint == outline(source).fingerprint

    (tmp_path / "in.jsonl").write_text(json.dumps({"tokens": [1, 5, 9, 11]}) + "\n")
    lines = []
    for base in (source, output):
        files = {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl")}
        score = config_of("score", base=base, **files)
        configs.run_config(score, tmp_path / "score")
        lines.append((tmp_path / "out.jsonl").read_text())
        described = dry_run.describe(configs.read(score), tmp_path)
        assert described["bytes"]["devices"]["base"] == result["bytes"]
    assert lines[0] == lines[1]


def test_an_unknown_mesh_size_is_refused_before_anything_is_read():
    with pytest.raises(UserError, match=r"'fsdp': -1.*size of every axis"):
        configs.load("configs/convert.py", "--config.mesh.fsdp=-1").preflight()
