"""Runs a peer in an interpreter of its own environment, by lines of JSON."""

import json
import subprocess
from pathlib import Path
from typing import Any


class Elsewhere:
    """The program, after its first line describes it.

    Args:
        python: the interpreter.
        program: a file that needs nothing of ours. It answers each line of its input with one, a
            JSON value each, after a first one with its ``version``, and ends with its input.
        argument: given to it.
        log: file for what it prints besides.

    Raises:
        RuntimeError: it ended; with its last words.
    """

    def __init__(self, python: str, program: str, argument: str, log: Path):
        self._log = log
        with log.open("w") as out:
            # -I: not our packages, which its environment lacks
            command = [python, "-I", program, argument]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True
            )
        self.version = self._answer()["version"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(60)
            words = self._log.read_text().strip().splitlines()
            raise RuntimeError(
                f"the peer ended with status {self._process.returncode}:"
                f" {words[-1] if words else 'no word'}; see {self._log}"
            )
        return json.loads(line)

    def ask(self, question: Any) -> Any:
        """Its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
