"""The workdir of a run: one process at a time, one config, and the files ``config.json`` and
``result.json``.

A process holds a lock on ``run.lock`` for as long as it lives; a killed process holds nothing. On a
network file system the lock of another machine may be invisible: then that run's sessions in the
catalog show whether it lives (``recorder``). Of several processes all call the functions here, and
the first writes.
"""

import fcntl
import json
import os
import re
import socket
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from mint_jax import multihost, stamp
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.harness import settings
from mint_jax.harness.options import RecipeSettings, TrainingSettings

LOCK = "run.lock"
# distinguishes machines of one name, and a machine from itself before a reboot
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Holder(NamedTuple):
    """The process that holds a workdir. ``since`` is in UTC; ``machine`` is the host and its boot,
    ``host/boot``.
    """

    host: str
    pid: int
    since: str
    machine: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, there since {self.since} UTC"


class WorkdirLock:
    """Locks a workdir until ``release``.

    Attributes:
        me: this process.
        is_sure: no other process of this machine uses the workdir; False on a file system without
            locks.

    Raises:
        UserError: a living process has the workdir, or it cannot be written.
    """

    def __init__(self, workdir: Path):
        host, now = socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        self.me = Holder(host, os.getpid(), now, _machine(host))
        self._file = -1
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            self._file = os.open(workdir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            _locks.add(self)
            self.is_sure = _lock(self._file, workdir)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(self.me._asdict()).encode(), 0)
        except OSError as error:
            self.release()
            raise _unwritable(workdir, error) from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Frees the workdir."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        _locks.discard(self)


_locks: "weakref.WeakSet[WorkdirLock]" = weakref.WeakSet()
# a child that outlives a killed run must not keep the lock
os.register_at_fork(after_in_child=lambda: [lock.release() for lock in list(_locks)])


def _lock(handle: int, workdir: Path) -> bool:
    """Locks the open file; returns False on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(handle, workdir) from None
    except OSError:
        return False
    return True


def claim(config: TrainingSettings, workdir: Path) -> None:
    """Saves the config of a training run, which may resume the steps in the workdir.

    A run that ended before its first step leaves nothing: another config may follow it.

    Raises:
        UserError: the workdir has steps of another config.
    """

    def look() -> None:
        try:
            _refuse_other_config(config, workdir)
        except UserError:
            rows = workdir / "metrics.jsonl"  # every step writes here first
            has_rows = rows.is_file() and rows.stat().st_size > 0
            if has_rows or any(workdir.glob("checkpoints/*")):
                raise
            _forget_start(workdir / "run.json")
            (workdir / "trackers.json").unlink(missing_ok=True)

    multihost.agree("workdir", look)
    save_config(config, workdir)


def save_config(config: RecipeSettings, workdir: Path) -> None:
    """Writes ``config.json``.

    Raises:
        UserError: the workdir cannot be written, or processes have different configs.
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


def _refuse_other_config(config: TrainingSettings, workdir: Path) -> None:
    if not (file := workdir / "config.json").is_file():
        return

    def flat(tree: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {path.removeprefix("."): tree}
        return {
            k: v for name, each in tree.items() for k, v in flat(each, f"{path}.{name}").items()
        }

    old, new = flat(json.loads(file.read_text())), flat(to_json(config))
    for key in sorted(old.keys() | new.keys()):
        if key.split(".")[0] not in config.CHANGEABLE and old.get(key) != new.get(key):
            raise UserError(
                f"workdir {workdir} holds a run with {key}={old.get(key)!r}, this one has"
                f" {new.get(key)!r}: choose another --workdir, or remove that folder, or repeat its"
                " config to resume it"
            )


def _forget_start(file: Path) -> None:
    """Keeps the run's id, by which it takes back its policies, and drops where they began."""
    try:
        run = json.loads(file.read_text())
    except FileNotFoundError:
        return
    except ValueError:
        run = {}
    write_file(file, json.dumps({"id": run["id"]}) if "id" in run else "{}")


def _in_use(handle: int, workdir: Path) -> UserError:
    try:
        holder = str(Holder(**json.loads(os.pread(handle, 4096, 0))))
    except (OSError, ValueError, TypeError):
        holder = "a process that has just started"
    return UserError(
        f"workdir {workdir} is in use by {holder}: wait until it ends, stop it, or choose another"
        " --workdir"
    )


def _unwritable(workdir: Path, error: OSError) -> UserError:
    return UserError(f"workdir {workdir} cannot be written ({error}): choose another --workdir")


def _machine(host: str) -> str:
    try:
        return f"{host}/{_BOOT.read_text()[:13]}"
    except OSError:
        return host
