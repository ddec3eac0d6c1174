"""A catalog that this user may only read is listed, exported and sampled from, and says no to
changes.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from tests.catalog import peft_dirs
from tests.marks import first

ROOT = Path(__file__).parents[2]
# To root nothing is read-only: such a process first gives up the right to write what a mode forbids
# (CAP_DAC_OVERRIDE), and that alone. As another user it could not import from a checkout that is
# closed to others.
READER = """
import ctypes, os, runpy, sys
from pathlib import Path

if os.getuid() == 0:
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, sets) == 0
    sets[0], sets[1] = sets[0] & ~2, sets[1] & ~2  # effective and permitted
    assert libc.capset(header, sets) == 0

from mint_jax.catalog.cli.main import main
from tests.configs import run_config

folder, base, out, *commands = sys.argv[1:]
try:
    open(Path(folder) / "x", "w")
except OSError:
    print("may not write", flush=True)
for command in commands:
    print("status", main([f"--catalog={folder}", *command.split()]), flush=True)
config = runpy.run_path("configs/sample.py")["get_config"]()
config.update(base=base, catalog=folder, input=f"{out}/in.jsonl", output=f"{out}/out.jsonl")
config.sampling.max_tokens = 3
print("sampled", run_config(config, Path(out) / "work")["tokens"], flush=True)
"""


@pytest.fixture
def open_folder():
    """A folder that everybody may reach; pytest's own are for their owner alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def close_off(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)


@pytest.mark.parametrize("writer", first(1, ["there", "gone"]))
def test_a_catalog_of_others_is_listed_and_sampled_from(writer, open_folder):
    base = peft_dirs.make_base(open_folder / "base")
    data = pack(peft_dirs.random_factors(base, 1), Schema(base.fingerprint, peft_dirs.CONFIG))
    catalog = Catalog.open(open_folder / "catalog")
    catalog.export("chat", data, 1, create=True)
    if writer == "gone":
        catalog.close()
    log = open_folder / "catalog" / "catalog.db-wal"
    assert log.is_file() == (writer == "there")
    out = open_folder / "out"
    out.mkdir()
    out.chmod(0o777)
    (out / "in.jsonl").write_text(
        json.dumps({"tokens": [1, 2, 3], "adapter": "chat@latest"}) + "\n"
    )
    close_off(open_folder / "catalog")
    for path in (open_folder / "base").rglob("*"):
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o444)
    commands = ["ls", "show chat@1", "verify", "gc --dry-run", "promote chat@1"]
    commands.append(f"export chat --packed={out}/packed")
    caches = {"HOME": str(out), "XDG_CACHE_HOME": str(out / "cache")}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""} | caches
    places = map(str, (open_folder / "catalog", open_folder / "base", out))
    command = [sys.executable, "-c", READER, *places, *commands]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300
    )
    catalog.close()
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-3000:]
    assert lines[0] == "may not write"
    statuses = [line.split()[1] for line in lines if line.startswith("status")]
    assert statuses == ["0", "0", "0", "0", "2", "0"]
    assert "readonly database: make the file and its folder writable" in done.stderr
    assert lines[-1] == "sampled 3"
    assert (out / "packed").read_bytes() == data
