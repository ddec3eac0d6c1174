"""A workdir belongs to one process and to one config: other processes are refused until the holder
is dead, other configs once a step was done.
"""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mint_jax.errors import UserError
from mint_jax.harness import workdir
from mint_jax.harness.workdir import WorkdirLock
from tests.configs import read, run_config

ROOT = Path(__file__).parents[2]


def config_of(**changes):
    policies = {"adder": {"data": {"env": "digit_sum"}, "adapter": {"rank": 2}}}
    return read({"job": "sft", "base": "tiny-random", "steps": 1, "policies": policies} | changes)


def saved(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_start_that_failed_does_not_keep_the_workdir(tmp_path):
    with pytest.raises(UserError, match="needs 8 devices"):
        run_config(config_of(mesh={"data": 1, "tensor": 8}), tmp_path)
    (tmp_path / "run.json").write_text('{"id": "me"}')
    workdir.claim(config_of(), tmp_path)
    assert saved(tmp_path)["mesh"]["tensor"] == 1
    assert not (tmp_path / "run.json").exists(), "the other config's start is dropped"


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step_1"])
def test_a_workdir_with_steps_refuses_another_config(tmp_path, left):
    workdir.claim(config_of(), tmp_path)
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("{}\n")
    (tmp_path / "run.json").write_text('{"id": "me"}')
    with pytest.raises(UserError, match="a run with seed=0, this one has 7: choose another"):
        workdir.claim(config_of(seed=7), tmp_path)
    workdir.claim(config_of(steps=9), tmp_path)
    assert (saved(tmp_path)["seed"], saved(tmp_path)["steps"]) == (0, 9)
    assert (tmp_path / "run.json").exists()


def _wait(connection):
    connection.send("started")
    connection.recv()


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path):
    lock = WorkdirLock(tmp_path)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_wait, args=(theirs,))
    child.start()
    assert ours.recv() == "started"
    try:
        lock.release()  # as its end does
        WorkdirLock(tmp_path).release()
    finally:
        ours.send(None)
        child.join()


def train(folder: Path, err: Path) -> subprocess.Popen:
    job = ["--config=configs/tiny/sft.py", f"--workdir={folder}", "--config.steps=100000"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "mint_jax.launch", *job]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": err.open("w")}
    return subprocess.Popen(command, env=env, cwd=ROOT, **quiet)


def wait_for(line: str, file: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while line not in file.read_text():
        assert process.poll() is None and time.monotonic() < deadline, file.read_text()[-2000:]  # noqa: PT018
        time.sleep(0.1)


@pytest.mark.long
def test_the_same_command_twice_leaves_the_first_training(tmp_path):
    """The second process is refused while the first lives, and takes over once it was killed."""
    running = []

    def run(name, line=""):
        running.append(train(tmp_path / "work", tmp_path / name))
        if line:
            wait_for(line, tmp_path / name, running[-1])
        return running[-1]

    try:
        first, second = run("first", "step 2"), run("second")
        assert second.wait(120) == 2
        says = (tmp_path / "second").read_text()
        assert f"in use by process {first.pid} on host {socket.gethostname()}" in says
        assert "base" not in says, "the base was loaded before the refusal"
        assert first.poll() is None, (tmp_path / "first").read_text()[-2000:]
        first.kill()
        first.wait()
        run("third", "step")
    finally:
        for process in running:
            process.kill()
            process.wait()
