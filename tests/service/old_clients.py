"""Runs ``old_client.py`` against a server under old SDKs, each in an environment of its own.

``python -m tests.service.old_clients FOLDER``: FOLDER gets the environments, which are made once
and need a package index, and the server's folder. Exits with 0 where all sessions were as they
should be.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.service_client import Served

CLIENTS = {  # what is installed -> the key that it accepts
    ("tinker==0.6.0",): "tml-any",  # the oldest that is claimed
    ("tinker==0.15.0",): "tml-any",  # what mint-cookbook pins: no client config, JSON alone
    # MinT's form, which is exchanged for a token
    ("tinker==0.22.0", "mindlab-toolkit==0.2.0"): "sk-any",
}
CONFIG = "configs/serve.py:ci"
SESSION_S = 300


def interpreter(folder: Path, packages: tuple[str, ...]) -> Path:
    """The Python of an environment that has these, which is made where there is none."""
    home = folder / "-".join(packages).replace("=", "")
    python, stamp = home / "bin" / "python", home / "installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
            check=True,
        )
        stamp.touch()
    return python


def main(folder: Path) -> int:
    pythons = {packages: interpreter(folder.resolve(), packages) for packages in CLIENTS}
    failed = 0
    with tempfile.TemporaryDirectory(dir=folder) as workdir:
        environment = {"JAX_PLATFORMS": "cpu"}
        served = Served(
            "mint_jax.launch", CONFIG, Path(workdir) / "server", {"port": 0}, environment
        )
        try:
            url = served.ready()
            for packages, key in CLIENTS.items():
                print(f"== {' '.join(packages)}", flush=True)
                session = [pythons[packages], Path(__file__).with_name("old_client.py"), url, key]
                failed += subprocess.run(session, timeout=SESSION_S, cwd=folder).returncode != 0
        finally:
            served.kill()
    return failed


if __name__ == "__main__":
    where = Path(sys.argv[1])
    where.mkdir(parents=True, exist_ok=True)
    sys.exit(main(where))
