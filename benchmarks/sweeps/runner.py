"""Runs the points of a sweep one after another, each in its own process, and resumes after a stop.

A run's folder below ``WORKDIR/points`` has its log and output. ``record.json``, written atomically,
has the outcome and the key: arguments, commit and uncommitted changes. A finished run of the same
key is not repeated; a failed one is, in its folder, where a training job finds its checkpoint.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.launch import program_of
from benchmarks.sweeps.grid import Point
from mint_jax import checkpoint, stamp
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.metrics import clock

GRACE_S = 60.0  # for a job to write its checkpoint when the sweep is stopped
# A sweep that is killed leaves no process that continues during the next start. The child
# asks for it itself (prctl's PR_SET_PDEATHSIG is 1): a function between fork and exec may not run
# where JAX has threads.
_ASK = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_WITH_PARENT = (sys.executable, "-S", "-c", _ASK) if sys.platform == "linux" else ()


class Run(NamedTuple):
    """One process of a point."""

    point: Point
    seed: int | None

    @property
    def name(self) -> str:
        return self.point.name if self.seed is None else f"{self.point.name}-seed{self.seed}"

    def folder(self, workdir: Path) -> Path:
        return workdir / "points" / self.name

    def arguments(self) -> list[str]:
        """Config and options, with places still to be filled in."""
        seeded = [] if self.seed is None else [f"--config.seed={self.seed}"]
        return [*self.point.arguments(), *seeded]

    def key(self, code: Any) -> str:
        """The digest of all that decides what the run measures, but for the machine."""
        return blake3_of(json.dumps([self.arguments(), code], sort_keys=True).encode())


def runs_of(points: Sequence[Point]) -> list[Run]:
    return [Run(point, seed) for point in points for seed in point.of.seeds or (None,)]


def run_all(
    points: Sequence[Point],
    workdir: Path,
    say: Callable[[str], None],
    program: Callable[[str], Sequence[str]] = program_of,
) -> dict[str, Any]:
    """Runs what is not done; returns each run's record: ``state`` (done or failed), ``reason``,
    ``seconds``, ``key``, ``command``. ``program`` returns the command of a config.
    """
    runs, code = runs_of(points), [stamp.code(), stamp.changes()]
    records = {run.name: _record(run, workdir, code) for run in runs}
    todo = [run for run in runs if records[run.name] is None]
    if done := len(runs) - len(todo):
        say(f"{done} of {len(runs)} runs are done already, in {workdir / 'points'}")
    expected, spent = 0.0, 0.0
    for k, run in enumerate(todo):
        pace = spent / expected if spent else 1.0
        left = 60 * pace * sum(one.point.of.minutes for one in todo[k:])
        progress = f"{clock(spent)}, about {clock(left)} left"
        say(f"[runs] {done + k + 1}/{len(runs)} {run.name} ({progress})")
        records[run.name] = record = _run(run, workdir, code, program(run.point.of.config))
        expected, spent = expected + 60 * run.point.of.minutes, spent + record["seconds"]
        if record["state"] == "failed":
            say(f"[runs] {run.name} failed after {clock(record['seconds'])}: {record['reason']}")
    return records


def _record(run: Run, workdir: Path, code: Any) -> dict[str, Any] | None:
    """Returns the record of a finished run of this key; removes the folder of another key."""
    folder, key = run.folder(workdir), run.key(code)
    if not (folder / "key").is_file() or (folder / "key").read_text() != key:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    if not (folder / "record.json").is_file():
        return None
    record = json.loads((folder / "record.json").read_text())
    return record if record["state"] == "done" and record["key"] == key else None


def _run(run: Run, workdir: Path, code: Any, command: Sequence[str]) -> dict[str, Any]:
    """Runs one process to its end, and writes its record."""
    folder, key = run.folder(workdir), run.key(code)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "key", key)
    (folder / "result.json").unlink(missing_ok=True)
    arguments = [text.replace("{workdir}", str(workdir)) for text in run.arguments()]
    environment = dict(os.environ)
    if run.point.of.empty_cache:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        environment["MINT_JAX_CACHE"] = str(folder / "cache")
    began = time.monotonic()
    with (folder / "log").open("w") as log:
        status = _wait([*command, *arguments, f"--workdir={folder}"], log, environment)
    reason = "" if status == 0 else _reason(status, folder / "log")
    if not reason and not (folder / "result.json").is_file():
        reason = "it ended well and left no result.json"
    shown = ["python", *command[1:], *run.arguments(), f"--workdir=points/{run.name}"]
    record = {
        "key": key,
        "state": "failed" if reason else "done",
        "reason": reason,
        "seconds": round(time.monotonic() - began, 1),
        "command": " ".join(shown),
    }
    write_file(folder / "record.json", json.dumps(record))
    if not reason:
        shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)
    return record


def _wait(command: list[str], log: Any, environment: dict[str, str]) -> int:
    """The exit status of a process that does not outlive this one."""
    process = subprocess.Popen(
        [*_WITH_PARENT, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _reason(status: int, log: Path) -> str:
    """Returns why a process failed: its signal, or its last error."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")] or lines[-1:]
    return errors[-1][:500] if errors else f"status {status}, and nothing in {log.name}"


def result_of(run: Run, workdir: Path) -> dict[str, Any]:
    """Returns the result of a run."""
    path = run.folder(workdir) / "result.json"
    try:
        return stamp.load(path)
    except ValueError as error:
        raise UserError(
            f"{path} is no JSON ({error}): remove the folder, and start the sweep again"
        ) from None
