"""Clients of others against a server of ours: their environments, their processes, and a report."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Failed(Exception):
    """A check did not hold."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


def report(checks: Mapping[str, Callable[[], str]]) -> int:
    """Runs checks; prints a line for each and a JSON object of all, and returns the exit code."""
    found = {}
    for name, check in checks.items():
        started = time.monotonic()
        try:
            text, ok = " ".join(check().split()), True
        except (Failed, OSError, LookupError, ValueError, subprocess.TimeoutExpired) as failure:
            text, ok = f"{type(failure).__name__}: {failure}", False
        wall_s = round(time.monotonic() - started, 1)
        found[name] = {"ok": ok, "found": text, "wall_s": wall_s}
        print(f"{name:14}{'ok    ' if ok else 'FAILED'} {wall_s:7.1f} s  {text}", flush=True)
    ok = all(one["ok"] for one in found.values())
    print(json.dumps({"ok": ok, "checks": found}))
    return 0 if ok else 1


def chosen(parser: argparse.ArgumentParser, names: Sequence[str], known: Sequence[str]) -> list:
    """Returns the names that the command line gives; all by default."""
    if unknown := set(names) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    return list(names or known)


def interpreter(home: Path, packages: Sequence[str], stamp: str = "installed") -> Path:
    """Returns the Python of an environment with packages, made unless it has this stamp."""
    python, installed = home / "bin" / "python", home / "installed"
    if not installed.exists() or installed.read_text() != stamp:
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        quiet = ("--quiet", "--no-compile", "--disable-pip-version-check")
        subprocess.run([python, "-m", "pip", "install", *quiet, *packages], check=True)
        installed.write_text(stamp)
    return python


def begin(
    command: Sequence[object], folder: Path, log: Path, where: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """Starts a client in a folder, without a network; its output goes to a file."""
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "PYTHONPATH": ""}
    quiet |= {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "TINKER_TELEMETRY": "0"}
    log.parent.mkdir(exist_ok=True)
    with open(log, "ab") as out:
        words, environment = [str(word) for word in command], os.environ | quiet | dict(where or {})
        return subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=out)


def whole(
    command: Sequence[object],
    folder: Path,
    log: Path,
    where: Mapping[str, str] | None = None,
    limit_s: float = 3600.0,
) -> str:
    """Runs a client to its end, and returns its output. Raises ``Failed``."""
    process = begin(command, folder, log, where)
    try:
        code = process.wait(limit_s)
    finally:
        process.kill()
    text = log.read_text(errors="replace")
    need(code == 0, f"it ended with {code}: see {log}: {text[-500:]}")
    return text
