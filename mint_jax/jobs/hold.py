"""One process at a time runs in a workdir: it holds a lock on a file there, which its end releases,
however it comes.

The kernel is the judge of who lives: a process that was killed holds nothing. Where the folder is
on a network and the holder was another machine, its lock may not be seen from here; then its
sessions in the catalog show whether it lives (``recorder``).
"""

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import NamedTuple

from mint_jax import multihost
from mint_jax.errors import UserError

FILE = "run.lock"
# a process that only looks has the lock for a moment, and a holder's name is there a moment after
# its lock
LOOK_S = 1.0
# distinguishes machines of one name, and a machine from itself before a reboot
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Process(NamedTuple):
    """Who has a workdir; ``since`` is a time in UTC, ``machine`` names the host since it was
    started.
    """

    host: str
    pid: int
    since: str
    machine: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, there since {self.since} UTC"


class Hold:
    """A workdir taken by this process until ``release``.

    Attributes:
        me: this process.
        sure: whether all others of this machine that had it are known to be gone; not on a file
            system without locks.

    Raises:
        UserError: a living process has it, which is named; or the workdir cannot be written.
    """

    def __init__(self, workdir: Path):
        host = socket.gethostname()
        self.me = Process(
            host, os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), _machine(host)
        )
        self._file = -1
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            self._file = os.open(workdir / FILE, os.O_RDWR | os.O_CREAT, 0o644)
            _held.add(self)
            self.sure = self._lock(workdir)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(self.me._asdict()).encode(), 0)
        except OSError as error:
            self.release()
            raise UserError(
                f"workdir {workdir} cannot be written ({error}): choose another --workdir"
            ) from None
        except BaseException:
            self.release()
            raise

    def _lock(self, workdir: Path) -> bool:
        deadline = time.monotonic() + LOOK_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _taken(self._file, workdir) from None
            except OSError:
                return False
            time.sleep(LOOK_S / 20)

    def release(self) -> None:
        """Lets others in."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        _held.discard(self)


def refuse_if_held(workdir: Path) -> None:
    """Raises what ``Hold`` would where a living process has the workdir; changes nothing. All
    processes call it.
    """

    def look() -> None:
        try:
            handle = os.open(workdir / FILE, os.O_RDONLY)
        except OSError:
            return  # no run was here; taking the lock reports what else may be wrong
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(handle, workdir) from None
        except OSError:
            return
        finally:
            os.close(handle)

    multihost.agree("whether the workdir is free", look)


def _taken(handle: int, workdir: Path) -> UserError:
    try:
        holder = str(Process(**json.loads(os.pread(handle, 4096, 0))))
    except (OSError, ValueError, TypeError):
        holder = "a process that has just started"
    return UserError(
        f"workdir {workdir} is in use by {holder}: wait until it ends, stop it, or choose another"
        " --workdir"
    )


def _machine(host: str) -> str:
    try:
        return f"{host}/{_BOOT.read_text()[:13]}"
    except OSError:
        return host


_held: "weakref.WeakSet[Hold]" = weakref.WeakSet()


def _let_go() -> None:
    for one in list(_held):
        one.release()


# a child that outlives a killed run must not keep the lock
os.register_at_fork(after_in_child=_let_go)
