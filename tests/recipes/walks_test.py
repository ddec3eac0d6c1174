"""Files that recipes leave, as other programs read them."""

import subprocess
import sys

import numpy as np
import pytest

from mint_jax import nested
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from tests.configs import run_config, tiny

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


@pytest.mark.long
def test_plain_orbax_restores_the_adapters_of_a_checkpoint(tmp_path):
    workdir = tmp_path / "run"
    result = run_config(tiny("sft", steps=3), workdir)
    wanted = {}
    with Catalog.open(workdir / "catalog") as catalog:
        for policy in result["policies"]:
            for path, leaf in nested.leaves_with_path(unpack(catalog.load(policy["revision"]))[0]):
                wanted[f"{policy['name']}/{path}"] = np.array(leaf)
    command = [sys.executable, "-c", PLAIN, str(workdir / "checkpoints" / "step_6")]
    command.append(str(tmp_path / "found.npz"))
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = np.load(tmp_path / "found.npz")
    assert set(wanted) == set(found)
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
