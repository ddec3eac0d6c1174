"""A process that has imported and warmed everything, and forks workers to be killed: 20 ms each
instead of seconds.

Spoken to in lines of JSON; every line gets one line of answer. A worker runs one function of
``deeds`` or ``inspect`` with an opened catalog, whose connections are its own, and leaves what it
returns in a file.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class Nursery:
    """The parent's side.

    Args:
        database, payloads: where the catalog is; the nursery makes it.
    """

    logs = ""

    def __init__(self, database: str, payloads: str):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.catalog.faults.nursery",
            database,
            payloads,
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            bufsize=1,
        )
        self._folder = tempfile.TemporaryDirectory()
        self._made = 0
        self._files: dict[int, Path] = {}
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the nursery has died: {self._process.wait()}"
        return json.loads(line)

    def _ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        return self._answer()

    def fork(self, task: str, **arguments: Any) -> int:
        """Starts ``module.function`` in a fresh process; its id, valid until ``wait``."""
        self._made += 1
        file = Path(self._folder.name) / str(self._made)
        process = self._ask(do="fork", task=task, arguments=arguments, file=str(file))
        self._files[process] = file
        return process

    def wait(self, process: int) -> tuple[int, Any]:
        """Exit code, negative for a signal, and the value returned."""
        code = self._ask(do="wait", process=process)
        file = self._files.pop(process)
        value = json.loads(file.read_text()) if file.exists() else None
        assert code in (0, -9), value
        return code, value

    def run(self, task: str, **arguments: Any) -> Any:
        """A task to its end."""
        code, value = self.wait(self.fork(task, **arguments))
        assert code == 0
        return value

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()


def _work(catalog: Any, order: dict[str, Any]) -> None:
    """The life of a worker; never returns."""
    import importlib

    try:
        module, _, name = order["task"].rpartition(".")
        code, value = (
            0,
            getattr(importlib.import_module(f"tests.catalog.faults.{module}"), name)(
                catalog, **order["arguments"]
            ),
        )
    except BaseException:
        code, value = 1, traceback.format_exc()
    Path(order["file"]).write_text(json.dumps(value))
    os._exit(code)


def main(database: str, payloads: str) -> None:
    from mint_jax.catalog.lifecycle import Catalog
    from tests.catalog.faults import deeds

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a worker prints is no answer

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")

    catalog = Catalog.open(database, payloads, actor="nursery")
    deeds.warm(catalog)
    # what SQLAlchemy has compiled stays; no connection crosses a fork
    catalog.database.engine.dispose()
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, all memory
    answer("ready")
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if order["do"] == "wait":
            answer(os.waitstatus_to_exitcode(os.waitpid(order["process"], 0)[1]))
        elif process := os.fork():
            answer(process)
        else:
            _work(catalog, order)


if __name__ == "__main__":
    main(*sys.argv[1:])
