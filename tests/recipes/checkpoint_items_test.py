"""What a training checkpoint is to other programs: its adapters restore alone with plain Orbax; and
those of before still open.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mint_jax import nested
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.checkpoint import Checkpoints
from mint_jax.harness import training
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
def test_adapters_restore_alone_and_checkpoints_of_before_still_open(tmp_path, monkeypatch):
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

    for write in (whole, injected):
        old = tmp_path / write.__name__
        with monkeypatch.context() as patched:
            patched.setattr(
                training, "Checkpoints", type("Before", (training.Checkpoints,), {"save": write})
            )
            run_config(tiny(steps=2), old)
        assert ("adapters" in {path.name for path in newest(old).iterdir()}) == (write is injected)
        resumed = run_config(tiny(steps=3), old)
        assert "adapters" in {path.name for path in newest(old).iterdir()}
        same = final(workdir, result)
        for path, leaf in final(old, resumed).items():
            np.testing.assert_array_equal(leaf, same[path], err_msg=path)
        with ocp.StandardCheckpointer() as checkpointer:
            assert json.dumps(sorted(checkpointer.restore(newest(old) / "adapters")))


def whole(self, step, arrays, extra, items=None):
    """One tree with everything, as it was written until adapters became an item, and the shapes in
    lists.
    """
    del extra["adapters"]
    extra["shapes"] = next(iter(extra["shapes"].values()))
    stacks = {
        bucket: training.TrainStack(adapters=items["adapters"][bucket], **rest)
        for bucket, rest in with_numbers(arrays).items()
    }
    Checkpoints.save(self, step, stacks, extra)


def injected(self, step, arrays, extra, items=None):
    """AdamW's numbers a second time, as they were kept beside the moments."""
    Checkpoints.save(self, step, with_numbers(arrays), extra, items)


def with_numbers(arrays):
    """Stacks whose optimizer state is that of ``optax.inject_hyperparams``."""
    names = ("learning_rate", "b1", "b2", "eps", "weight_decay", "max_grad_norm")
    out = {}
    for bucket, rest in arrays.items():
        numbers = {name: getattr(rest["hyper"], name) for name in names}
        out[bucket] = rest | {
            "opt": optax.schedules.InjectStatefulHyperparamsState(
                rest["steps"], numbers, {}, rest["opt"]
            )
        }
    return out
