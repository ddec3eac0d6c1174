"""Two processes and one workdir: the second is refused and told who has it, until the first is
dead; then it goes on at once.
"""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mint_jax.errors import UserError
from mint_jax.harness import workdir
from mint_jax.harness.workdir import WorkdirLock

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny" / "sft.py"


def test_a_living_holder_is_named_and_a_dead_one_followed_at_once(tmp_path, monkeypatch):
    code = (
        "import sys, time, pathlib; from mint_jax.harness.workdir import WorkdirLock; h ="
        " WorkdirLock(pathlib.Path(sys.argv[1])); print('has it', flush=True)"
    )
    code += "; time.sleep(600)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "has it\n"
            said = (
                rf"in use by process {holder.pid} on host {re.escape(socket.gethostname())}, there"
                r" since 20\d\d-.* UTC"
            )
            for attempt in (WorkdirLock, workdir.refuse_if_locked, WorkdirLock):
                with pytest.raises(UserError, match=said):
                    attempt(tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
    workdir.refuse_if_locked(tmp_path)
    monkeypatch.setattr(workdir, "WAIT_S", 120.0)  # it is not waited for
    began = time.monotonic()
    mine = WorkdirLock(tmp_path)
    assert mine.is_sure
    assert time.monotonic() - began < workdir.WAIT_S / 2
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        workdir.refuse_if_locked(tmp_path)
    mine.release()
    WorkdirLock(tmp_path).release()


def test_who_only_looks_keeps_nobody_out(tmp_path):
    WorkdirLock(tmp_path).release()
    for _ in range(20):
        workdir.refuse_if_locked(tmp_path)
    WorkdirLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == [tmp_path / "run.lock"]
    workdir.refuse_if_locked(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def _wait(connection):
    connection.recv()


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path):
    mine = WorkdirLock(tmp_path)
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_wait, args=(receiver,))
    child.start()
    try:
        mine.release()  # as its end does
        WorkdirLock(tmp_path).release()
    finally:
        sender.send(None)
        child.join()


def train(workdir: Path, err: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "mint_jax.launch",
        f"--config={TINY}",
        f"--workdir={workdir}",
        "--config.steps=100000",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=err.open("w"), env=environment, cwd=ROOT
    )


def wait_for(line: str, file: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while line not in file.read_text():
        assert process.poll() is None, file.read_text()[-2000:]
        assert time.monotonic() < deadline, file.read_text()[-2000:]
        time.sleep(0.1)


@pytest.mark.long
def test_the_same_command_twice_leaves_the_first_training(tmp_path):
    """Real processes: the second is refused while the first lives, and takes over at once when it
    was killed.
    """
    workdir, running = tmp_path / "work", []
    try:
        running.append(first := train(workdir, tmp_path / "first"))
        wait_for("step 2", tmp_path / "first", first)
        running.append(second := train(workdir, tmp_path / "second"))
        assert second.wait(120) == 2
        said = (tmp_path / "second").read_text()
        assert f"in use by process {first.pid} on host {socket.gethostname()}" in said
        assert "base" not in said, "it was refused before the base was loaded"
        assert first.poll() is None, (tmp_path / "first").read_text()[-2000:]
        first.send_signal(signal.SIGKILL)
        first.wait()
        running.append(third := train(workdir, tmp_path / "third"))
        wait_for("step", tmp_path / "third", third)
        said = (tmp_path / "third").read_text()
        assert "waiting up to" not in said
        assert "fenced" not in (tmp_path / "first").read_text()
    finally:
        for process in running:
            process.kill()
            process.wait()
