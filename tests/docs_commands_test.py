"""The commands and files of docs/own_task.md, run as they stand there, on a base of random weights and for fewer steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from tests import oracles

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
SMALLER = {"smollm2-135m-instruct": "tiny-random", '"steps": 20': '"steps": 2', ".venv/bin/python": sys.executable}


def blocks(page: str) -> list[tuple[str, str]]:
    """(what stands behind the fence, text) of each fenced block, with less to do."""
    text = (ROOT / page).read_text()
    for long, short in SMALLER.items():
        assert long in text, f"{page} has no {long!r}"
        text = text.replace(long, short)
    return [(found["kind"], found["text"]) for found in BLOCK.finditer(text)]


@pytest.mark.long
def test_an_own_task_from_nothing_to_an_adapter_that_peft_loads(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    commands = 0
    for kind, text in blocks("docs/own_task.md"):
        if named := re.search(r'title="(.*)"', kind):
            (tmp_path / named[1]).write_text(text)
            continue
        for command in text.splitlines():
            command += " --config.base=tiny-random" if "mint_jax.launch" in command else ""
            done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
            commands += 1
    assert commands == 5
    assert (tmp_path / "runs" / "parity" / "rewards.png").is_file()
    policy, base = (json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines())
    assert policy["revision"] and not base["revision"]  # noqa: PT018

    for rows, config in (("rows.jsonl", "sft"), ("pairs.jsonl", "dpo")):
        command = [sys.executable, "-m", "mint_jax.launch", f"--config=configs/tiny/{config}.py", f"--workdir={tmp_path / config}"]
        settings = [f"--config.policies.*.data.path={rows}", "--config.policies.*.data.env=", "--config.steps=1"]
        done = subprocess.run([*command, *settings], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "parity-peft")
    assert sum(name.endswith("lora_A.default.weight") for name, _ in model.named_parameters()) > 0
    with torch.no_grad():
        assert np.isfinite(oracles.torch_logits(model, np.array([[1, 2, 3]]))).all()
