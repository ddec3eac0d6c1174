"""The workdir of a run: one process at a time, one config, and its files ``config.json`` and
``result.json``. Of several processes all call these functions, and the first writes.
"""

import fcntl
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mint_jax import multihost, nested, stamp
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.harness import settings
from mint_jax.harness.options import TRACKERS, RecipeSettings, TrainingSettings

ROLLOUTS = "rollouts.json"  # a run's examples, from the catalog
CHANGEABLE = (  # by a resumed run; the others must stay
    *("steps", "export_every", "checkpoint", "reward_workers", "reward_timeout"),
    *("reward_processes", "keep_rollouts", "cache_gib", "kernels", "tensorboard", *TRACKERS),
)


class WorkdirLock:
    """Locks ``run.lock`` of a workdir until ``release`` or the process's end. Raises ``UserError``
    if a living process has the workdir, or it cannot be written.
    """

    def __init__(self, workdir: Path):
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        holder = f"process {os.getpid()} on host {socket.gethostname()}, there since {now} UTC"
        self._file = -1
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            self._file = os.open(workdir / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
            _locks.add(self)
            lock(self._file, lambda: self._refusal(workdir))
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, holder.encode(), 0)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise _unwritable(workdir, error) from None
            raise

    def _refusal(self, workdir: Path) -> str:
        holder = os.pread(self._file, 4096, 0).decode() or "a process that has just started"
        return (
            f"workdir {workdir} is in use by {holder}: wait until it ends, stop it, or choose"
            " another --workdir"
        )

    def release(self) -> None:
        """Frees the workdir."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        _locks.discard(self)


_locks: "weakref.WeakSet[WorkdirLock]" = weakref.WeakSet()
# a child that outlives a killed run must not keep the lock
os.register_at_fork(after_in_child=lambda: [one.release() for one in list(_locks)])


def lock(handle: int, refusal: Callable[[], str]) -> None:
    """Locks an open file; raises ``UserError`` if another process has locked it. On a file system
    without locks the later of two training runs still fences off the other's policies.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(refusal()) from None
    except OSError:
        pass


def claim(config: TrainingSettings, workdir: Path) -> None:
    """Saves the config of a training run, which may resume the steps in the workdir. Raises
    ``UserError`` if the workdir has steps of another config.
    """

    def look() -> None:
        file = workdir / "config.json"
        if not file.is_file():
            return
        saved = json.loads(file.read_text()), to_json(config)
        old, new = (dict(nested.leaves_with_path(tree)) for tree in saved)
        fixed = [key for key in sorted({*old, *new}) if key.split("/")[0] not in CHANGEABLE]
        key = next((key for key in fixed if old.get(key) != new.get(key)), None)
        if key is None:
            return
        rows = workdir / "metrics.jsonl"  # every step writes here first
        has_rows = rows.is_file() and rows.stat().st_size > 0
        if has_rows or any(workdir.glob("checkpoints/*")):
            name = key.replace("/", ".")
            raise UserError(
                f"workdir {workdir} holds a run with {name}={old.get(key)!r}, this one has"
                f" {new.get(key)!r}: choose another --workdir, or remove that folder, or repeat its"
                " config to resume it"
            )
        # of a run that ended before its first step
        for name in ("run.json", "trackers.json", ROLLOUTS):
            (workdir / name).unlink(missing_ok=True)

    multihost.agree("workdir", look)
    save_config(config, workdir)


def save_config(config: RecipeSettings, workdir: Path) -> None:
    """Writes ``config.json``. Raises ``UserError`` if the workdir cannot be written, or processes
    have different configs.
    """
    saved = to_json(config)
    multihost.require_same("the config", lambda: saved)

    def write() -> None:
        try:
            write_file(workdir / "config.json", json.dumps(saved, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            raise _unwritable(workdir, error) from None

    multihost.agree("config.json", write)


def save_result(result: dict[str, Any], workdir: Path, config: RecipeSettings) -> None:
    """Writes ``result.json`` with its stamp; the result of a finished run keeps the one it has."""
    if multihost.is_main():
        made_by = result.get("stamp") or stamp.stamp(to_json(config))
        write_file(workdir / "result.json", json.dumps(result | {"stamp": made_by}) + "\n")


def to_json(config: RecipeSettings) -> dict[str, Any]:
    """Returns settings as JSON has them, without the password of the catalog's database."""
    out = settings.plain(config)
    if "catalog" in out:
        out["catalog"] = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", out["catalog"])
    return out


def _unwritable(workdir: Path, error: OSError) -> UserError:
    return UserError(f"workdir {workdir} cannot be written ({error}): choose another --workdir")
