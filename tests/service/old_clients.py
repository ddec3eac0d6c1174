"""Runs ``old_client.py`` against a server under old SDKs, each in an environment of its own.

``python -m tests.service.old_clients FOLDER``: FOLDER gets the environments, which are made once
and need a package index, and the server's folder. Exits with 0 where all sessions were as they
should be.
"""

import functools
import sys
import tempfile
from pathlib import Path

from benchmarks.service_client import Served
from tests.clients import runner

CLIENTS = {  # what is installed -> the key that it accepts
    ("tinker==0.6.0",): "tml-any",  # the oldest that is claimed
    ("tinker==0.15.0",): "tml-any",  # what mint-cookbook pins: no client config, JSON alone
    # MinT's form, which is exchanged for a token
    ("tinker==0.22.0", "mindlab-toolkit==0.2.0"): "sk-any",
}
SESSION = Path(__file__).with_name("old_client.py")
SESSION_S = 300


def main(folder: Path) -> int:
    names = {packages: "-".join(packages).replace("=", "") for packages in CLIENTS}
    pythons = {one: runner.interpreter(folder / name, one) for one, name in names.items()}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        workdir, machine = Path(name), {"JAX_PLATFORMS": "cpu"}
        options = "mint_jax.launch", "configs/serve.py:ci", workdir / "server", {"port": 0}
        served, checks = Served(*options, machine), {}
        try:
            url = served.ready()
            for packages, key in CLIENTS.items():
                command = [pythons[packages], SESSION, url, key]
                log = workdir / f"{names[packages]}.log"
                whole = functools.partial(runner.whole, command, workdir, log, None, SESSION_S)
                checks[names[packages]] = whole
            return runner.report(checks)
        finally:
            served.kill()


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    where.mkdir(parents=True, exist_ok=True)
    sys.exit(main(where))
