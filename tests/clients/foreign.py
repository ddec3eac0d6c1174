"""A client that is none of ours, in an environment of its own, and the server that it asks."""

import dataclasses
import os
import subprocess
import time
from pathlib import Path

from run import need

CALL_S = 1200.0


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A client and its server.

    Attributes:
        python: the interpreter of the client's environment.
        url: the server's.
        folder: empty, for what the client reads and writes.
        base: the server's, as it is called there and as we load it.
        tokenizer: folder of its tokenizer.
    """

    python: Path
    url: str
    folder: Path
    base: str
    tokenizer: Path

    def call(self, *command: object, allowed: tuple[int, ...] = (0,), **environment: str) -> str:
        """Runs a module of the client to its end; what it printed, which is kept in the folder as
        well.

        Raises:
            Failed: it ended otherwise than ``allowed``, or not in time.
        """
        told = self.folder / f"{time.monotonic_ns()}.log"
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hf"),
            "PYTHONPATH": "",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
        }
        with open(told, "wb") as log:
            process = subprocess.Popen(
                [str(self.python), "-m", *map(str, command)],
                cwd=self.folder,
                env=os.environ | quiet | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(CALL_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                process.kill()
        need(code in allowed, f"{command[0]} ended with {code}: see {told}")
        return told.read_text(errors="replace")
