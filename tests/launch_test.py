"""The command line: every mistake of the user ends with a non-zero status and one line that names
it, without a traceback.
"""

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mint_jax import launch as launcher
from mint_jax.errors import UserError

SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every command
SERVER.set_forkserver_preload(
    ["mint_jax.launch", "mint_jax.checkpoint", "mint_jax.catalog.lifecycle", "pytest"]
)
ROOT = Path(__file__).parents[1]
UNKNOWN_JOB = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({"job": "cook"})
"""
REFUSES = """
from mint_jax.errors import UserError

def get_config(arg="x"):
    raise UserError(f"size {arg} is too large")
"""


def command(args, cwd):
    """Runs ``python -m mint_jax.launch`` in a process that imports nothing anew."""
    os.chdir(cwd)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), descriptor)
    sys.argv = ["launch", *args]
    from mint_jax import launch

    launch.cli()


def launch(*args, cwd) -> tuple[int, str, str]:
    """Returns status, stdout and stderr."""
    process = SERVER.Process(target=command, args=(args, cwd))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, (cwd / "stdout").read_text(), (cwd / "stderr").read_text()


@pytest.fixture
def folder(tmp_path):
    """A working directory with a few configs and an input."""
    (tmp_path / "unknown_job.py").write_text(UNKNOWN_JOB)
    (tmp_path / "refuses.py").write_text(REFUSES)
    (tmp_path / "in.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    return tmp_path


def name_of(args) -> str:
    return "+".join(one.split("/")[-1].removeprefix("--config.") for one in args)


SCORE = f"--config={ROOT / 'configs' / 'score.py'}"
FILES = ("--config.input=in.jsonl", "--config.output=out.jsonl")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no config: give --config="),
        (("--config=unknown_job.py",), "job is 'cook'; choose one of: grpo, "),
        ((SCORE,), "input is empty: set --config.input="),
        ((SCORE, *FILES, "--config.mesh.tensor=3"), "devices"),
        (("--config=refuses.py:12",), "size 12 is too large"),
        ((SCORE, "--config.typo=1"), "typo is no setting"),
        ((SCORE, "--config.max_tokens"), "--config.max_tokens has no value"),
    ],
    ids=lambda x: name_of(x) if isinstance(x, tuple) else "",
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


TRAIN = f"--config={ROOT / 'configs' / 'tiny' / 'sft.py'}"
SERVE = f"--config={ROOT / 'configs' / 'serve.py'}"
POD = f"--config={ROOT / 'configs' / 'scale_up' / 'qwen3_4b.py'}"
EVALUATE = f"--config={ROOT / 'configs' / 'evaluate.py'}"


@pytest.mark.parametrize("dry", [(), ("--dry_run",)], ids=["run", "dry_run"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((TRAIN, "--config.base=nowhere"), "base is 'nowhere'; choose one of: "),
        (
            (TRAIN, "--config.policies.*.data.path=none.jsonl"),
            "data file none.jsonl does not exist",
        ),
        (
            (TRAIN, "--config.policies.*.data.env=nowhere:make"),
            "environment 'nowhere:make' could not be imported",
        ),
        ((TRAIN, "--workdir=in.jsonl/x"), "workdir in.jsonl/x cannot be written"),
        ((EVALUATE, "--config.catalog=nowhere"), "catalog nowhere does not exist"),
        ((POD, "--config.topology=v5p-60"), "topology is 'v5p-60'; choose one of: v5p-8, v5p-16, "),
    ],
    ids=lambda x: name_of(x) if isinstance(x, tuple) else "",
)
def test_a_dry_run_refuses_what_the_run_refuses(folder, args, message, dry):
    status, stdout, stderr = launch(*args, *dry, cwd=folder)
    assert (status, stdout) == (2, "")
    assert message in stderr.splitlines()[-1]
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("package", "args", "extra"),
    [
        ("wandb", (TRAIN, "--config.wandb=project"), "wandb"),
        ("mlflow", (TRAIN, "--config.mlflow=experiment"), "mlflow"),
        ("pyarrow", (TRAIN, "--config.policies.*.data.path=rows.parquet"), "data"),
        ("psycopg", (TRAIN, "--config.catalog=postgresql://localhost/mint"), "postgres"),
        ("starlette", (SERVE,), "serve"),
        ("ray", (SERVE.replace("serve.py", "fleet.py"),), "fleet"),
        ("libtpu", (POD,), "tpu-aot"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_optional_package_is_looked_for_before_anything_is_claimed(
    folder, monkeypatch, package, args, extra
):
    (folder / "rows.parquet").write_bytes(b"")
    monkeypatch.chdir(folder)
    known = importlib.util.find_spec

    def find_spec(name, *more):
        return None if name == package else known(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(UserError, match=rf"needs .*\[{extra}\]"):
        launcher.main(args)
    assert not (folder / "runs").exists()


def test_a_mistake_is_reported_before_jax_is_imported(folder):
    slow = {"jax", "flax", "optax", "tensorstore", "sqlalchemy"}
    code = (
        "import sys\nfrom mint_jax import errors, launch\n"
        "try:\n    launch.main(sys.argv[1:])\nexcept errors.UserError:\n"
        f"    assert not {slow} & set(sys.modules)\n    sys.exit(2)"
    )
    for args in (
        (SCORE, "--config.typo=1"),
        (TRAIN, "--config.base=nowhere"),
        (SCORE, "--config.input=none.jsonl"),
    ):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run([sys.executable, "-c", code, *args], env=env).returncode == 2, args


def test_a_run_prints_its_result_last_and_saves_it_with_its_config(folder, hf_dirs):
    args = [SCORE, *FILES, f"--config.base={hf_dirs('llama')}", "--config.max_tokens=64"]
    done = subprocess.run(
        [sys.executable, "-m", "mint_jax.launch", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    workdir = folder / "runs" / "score"  # the config's name
    *_, values, place = done.stdout.splitlines()
    assert "sequences 1, tokens 3" in values
    assert place == "result: runs/score/result.json"
    assert "WARNING" not in done.stderr
    saved = json.loads((workdir / "result.json").read_text())
    assert list(saved)[:3] == ["job", "sequences", "tokens"], "these are printed first"
    assert saved["stamp"]["config"]["max_tokens"] == 64
    assert json.loads((workdir / "config.json").read_text())["max_tokens"] == 64
    [row] = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert row["tokens"] == [1, 2, 3]
