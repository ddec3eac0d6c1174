"""The command line: every mistake of the user ends with a non-zero status and one line that names it, without a traceback."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every command
SERVER.set_forkserver_preload(["mint_jax.launch", "mint_jax.checkpoint", "mint_jax.catalog.lifecycle", "pytest"])
ROOT = Path(__file__).parents[1]
CONFIGS = {
    "unknown_job.py": "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'job': 'cook'})\n",
    "no_job.py": "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'base': 'tiny-random'})\n",
    "refuses.py": "from mint_jax.errors import UserError\ndef get_config(arg='x'):\n    raise UserError(f'size {arg} is too large')\n",
    "broken.py": "def get_config(:\n",
}


def command(args, cwd):
    """What ``python -m mint_jax.launch`` does, in a process of its own."""
    os.chdir(cwd)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), descriptor)
    sys.argv = ["launch", *args]
    from mint_jax import launch

    launch.cli()


def launch(*args, cwd) -> tuple[int, str, str]:
    """Status, stdout, stderr."""
    process = SERVER.Process(target=command, args=(args, cwd))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, (cwd / "stdout").read_text(), (cwd / "stderr").read_text()


@pytest.fixture
def folder(tmp_path):
    """A working directory with a few configs and an input."""
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "in.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    return tmp_path


SCORE = f"--config={ROOT / 'configs' / 'score.py'}"
FILES = ("--config.input=in.jsonl", "--config.output=out.jsonl")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no config: give --config="),
        ((SCORE, "extra"), "unexpected argument 'extra'"),
        (("--config=unknown_job.py",), "job is 'cook'; choose one of: grpo, "),
        ((SCORE, "--config.job=cook"), "job is 'cook'"),
        (("--config=no_job.py",), "job"),
        ((SCORE,), "input is empty: set --config.input="),
        ((SCORE, "--config.input=none.jsonl", "--config.output=out.jsonl"), "input none.jsonl does not exist"),
        ((SCORE, *FILES, "--config.base=nowhere"), "base is 'nowhere'; choose one of: "),
        ((SCORE, *FILES, "--config.mesh.tensor=3"), "devices"),
        ((SCORE, *FILES, "--workdir=in.jsonl"), "workdir in.jsonl cannot be written"),
        (("--config=none.py",), "none.py"),
        (("--config=refuses.py:12",), "size 12 is too large"),
        ((SCORE, "--config.typo=1"), "typo is no setting"),
        ((SCORE, "--config.mesh.typo=1"), "mesh.typo is no setting"),
        ((SCORE, "--config.max_tokenz=1"), "did you mean max_tokens?"),
        ((SCORE, "--config.max_tokens=many"), "max_tokens is 'many'; expected a whole number"),
        ((SCORE, "--config.max_tokens"), "--config.max_tokens has no value"),
    ],
    ids=lambda x: "+".join(a.split("/")[-1].removeprefix("--config.") for a in x) if isinstance(x, tuple) else "",
)
def test_a_users_mistake_is_one_line(folder, args, message):
    status, stdout, stderr = launch(*args, cwd=folder)
    assert status != 0
    assert stdout == ""
    assert "Traceback" not in stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert not (folder / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((SCORE, "--cofnig.max_tokens=3"), "cofnig"),
        (("--config=broken.py",), "SyntaxError"),
    ],
    ids=["flag", "syntax"],
)
def test_flags_that_cannot_be_parsed_are_named(folder, args, message):
    status, _, stderr = launch(*args, cwd=folder)
    assert status != 0
    assert message in stderr


def test_a_run_prints_its_result_last_and_saves_it_with_its_config(folder, hf_dirs):
    args = [SCORE, *FILES, f"--config.base={hf_dirs('llama')}", "--config.max_tokens=64"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "mint_jax.launch", *args], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["job"], result["sequences"], result["tokens"]) == ("score", 1, 3)
    workdir = folder / "runs" / "score"  # the config's name
    saved = json.loads((workdir / "result.json").read_text())
    assert saved.pop("stamp")["config"]["max_tokens"] == 64
    assert saved == result
    assert json.loads((workdir / "config.json").read_text())["max_tokens"] == 64
    [row] = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert row["tokens"] == [1, 2, 3]
