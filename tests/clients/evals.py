"""A third-party evaluation harness and fuzzer against a server of ours over
loopback: ``make test-evals``.

Each is in an environment of its own, with the versions of ``constraints/evals-NAME-py311.txt``. One
line tells of each what held, the last line is a JSON object of all; the exit code is 1 where one
failed.

lm_eval        choices, rolling and generated texts: scores and texts are those of our own model
schemathesis   requests by /openapi.json, right and wrong ones: no 5xx, no answer that the document
               does not have
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lm_eval_scores
import schemathesis_calls
from foreign import Foreign
from run import ROOT, Failed

from mint_jax.models.base import resolve

BASE = "tiny-random"
SERVE = ("-m", "mint_jax.launch", "--config=configs/serve.py:ci", "--config.port=0")
CHECKS: dict[str, Callable[[Foreign], str]] = {
    "lm_eval": lm_eval_scores.check,
    "schemathesis": schemathesis_calls.check,
}


def interpreter(folder: Path, name: str) -> Path:
    """The Python of a client's environment, which is made where there is none or where its versions
    are others.
    """
    home, wanted = (
        folder / name,
        ROOT
        / "constraints"
        / f"evals-{name}-py{sys.version_info.major}{sys.version_info.minor}.txt",
    )
    python, stamp = home / "bin" / "python", home / "installed"
    if not wanted.exists():
        raise Failed(f"there is no {wanted.name}: run it with Python 3.11")
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-compile", "-r", wanted], check=True
        )
        stamp.write_text(wanted.read_text())
    return python


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open(folder / "server.log", "wb") as log:
        command = [sys.executable, *SERVE, f"--workdir={folder / 'server'}"]
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log
        )
        assert server.stdout is not None
        try:
            first = server.stdout.readline()
            if not first:
                raise Failed(f"the server is not ready: see {folder / 'server.log'}")
            yield json.loads(first)["url"]
            if server.poll() is not None:
                raise Failed(
                    f"the server ended with {server.returncode}: see {folder / 'server.log'}"
                )
        finally:
            server.terminate()
            server.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--environments", type=Path, required=True, help="folder of the clients' environments"
    )
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CHECKS)}; all by default")
    asked = parser.parse_args()
    if unknown := set(asked.clients) - set(CHECKS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(CHECKS)}")
    names = asked.clients or list(CHECKS)
    pythons = {name: interpreter(Path(os.path.abspath(asked.environments)), name) for name in names}
    workdir = asked.workdir.resolve()
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    told = {}
    with served(workdir) as url:
        for name in names:
            (workdir / name).mkdir()
            begun = time.monotonic()
            try:
                held, ok = (
                    CHECKS[name](Foreign(pythons[name], url, workdir / name, BASE, resolve(BASE))),
                    True,
                )
            except (Failed, OSError, KeyError, IndexError, ValueError) as failure:
                held, ok = f"{type(failure).__name__}: {failure}", False
            wall_s = time.monotonic() - begun
            told[name] = {"ok": ok, "told": held, "wall_s": round(wall_s, 1)}
            print(f"{name:14}{'ok    ' if ok else 'FAILED'} {wall_s:7.1f} s  {held}", flush=True)
    ok = all(one["ok"] for one in told.values())
    print(json.dumps({"ok": ok, "clients": told}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
