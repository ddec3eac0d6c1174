"""The adapters of a training checkpoint restore alone, with plain Orbax."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mint_jax import nested
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from tests.configs import run_config

TINY = Path(__file__).parents[2] / "configs" / "tiny" / "sft.py"
PLAIN = """
import json, sys
sys.modules["mint_jax"] = None
import numpy as np, orbax.checkpoint as ocp

step, out = sys.argv[1:]
items = ocp.args.Composite(adapters=ocp.args.StandardRestore(), extra=ocp.args.JsonRestore())
with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    found = checkpointer.restore(step, items)
arrays = {}
def walk(node, path, one):
    if isinstance(node, dict):
        for name, child in node.items():
            walk(child, path + [name], one)
    else:
        arrays["/".join(path)] = np.asarray(node)[:, one["slot"], ..., : one["schema"]["rank"], :]
for policy, one in found.extra["adapters"].items():
    walk(found.adapters[one["bucket"]]["factors"], [policy], one)
np.savez(out, **arrays)
"""


def tiny(**changes):
    config = runpy.run_path(str(TINY))["get_config"]()
    config.update(changes)
    return config


def newest(workdir: Path) -> Path:
    return max(
        (workdir / "checkpoints").glob("step_*"),
        key=lambda path: int(path.name.removeprefix("step_")),
    )


def final(workdir: Path, result: dict) -> dict[str, np.ndarray]:
    """Factors of the final revisions, by policy and path."""
    out = {}
    with Catalog.open(workdir / "catalog") as catalog:
        for policy in result["policies"]:
            tree = unpack(catalog.load(policy["revision"]))[0]
            out |= {
                f"{policy['name']}/{path}": np.array(leaf)
                for path, leaf in nested.leaves_with_path(tree)
            }
    return out


@pytest.mark.long
def test_adapters_restore_alone(tmp_path):
    workdir = tmp_path / "run"
    result = run_config(tiny(steps=3), workdir)
    command = [sys.executable, "-c", PLAIN, str(newest(workdir)), str(tmp_path / "found.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found, wanted = np.load(tmp_path / "found.npz"), final(workdir, result)
    assert set(wanted) == set(found)
    assert len({path.split("/")[0] for path in wanted}) > 1, "several policies"
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
