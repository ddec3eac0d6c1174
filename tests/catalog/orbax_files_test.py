"""Revisions as Orbax checkpoints: plain Orbax restores them, they come back with their digest, and
strangers' are looked at first.
"""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from mint_jax.catalog import orbax_files
from mint_jax.catalog.packed import Schema, digest_of, pack
from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.config import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.hf_config import read_config
from tests.adapters import random_adapter
from tests.catalog.adapters import packed

FAMILIES = ["llama", "qwen3_moe", "deepseek_v3"]  # dense, packed experts, MLA

PLAIN = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mint_jax":
            raise ImportError("not here")

sys.meta_path.insert(0, Refuse())
import orbax.checkpoint as ocp

out = []
for directory in sys.argv[1:]:
    restored = ocp.Checkpointer(ocp.CompositeCheckpointHandler()).restore(directory)
    def walk(node, path):
        if isinstance(node, dict):
            for name, child in node.items():
                yield from walk(child, path + [name])
        else:
            yield "/".join(path), [str(node.dtype), list(node.shape), node.tobytes().hex()]
    out.append({"revision": restored["revision"], "adapter": dict(walk(restored["adapter"], []))})
print(json.dumps(out))
"""


def adapters_of(family, hf_dirs, rng):
    """Packed adapters of a family at ranks 1, 3 and 8, each in another dtype, with a few values
    that are not numbers.
    """
    specs = transformer.abstract(read_config(hf_dirs(family)))
    for rank, dtype in ((1, "float32"), (3, "bfloat16"), (8, "float16")):
        wanted = AdapterConfig(rank, 5.0, ("all-linear",), rslora=rank == 3)
        config = tree.spelled_out(wanted, specs)
        factors = random_adapter(rng, specs, config)
        jax.tree.leaves(factors)[0].flat[:3] = np.nan, np.inf, -0.0
        yield pack(factors, Schema("ab" * 32, config, dtype))


def test_plain_orbax_restores_every_family_and_the_digest_comes_back(rng, hf_dirs, tmp_path):
    made = {}
    for family in FAMILIES:
        for i, data in enumerate(adapters_of(family, hf_dirs, rng)):
            directory = tmp_path / f"{family}{i}"
            orbax_files.write(directory, data, {"policy": family, "number": i})
            again = orbax_files.read(directory, 1 << 30)
            assert digest_of(again) == digest_of(data)
            made[str(directory)] = data
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", PLAIN, *made]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    restored = json.loads(done.stdout.splitlines()[-1])
    for (directory, data), found in zip(made.items(), restored, strict=True):
        adapter, schema = orbax_files.unpack(data)
        assert found["revision"]["schema"] == json.loads(schema.to_json())
        assert found["revision"]["digest"] == digest_of(data)
        leaves = dict(orbax_files.nested.leaves_with_path(adapter))
        assert found["adapter"].keys() == leaves.keys(), directory
        for path, leaf in leaves.items():
            assert found["adapter"][path] == [schema.dtype, list(leaf.shape), leaf.tobytes().hex()]
    assert {leaf[0] for leaf in found["adapter"].values()} == {"float16"}


def corrupt(directory):
    """A flipped bit in every data file: some hold nothing that is read any more."""
    for file in [path for path in (directory / "adapter").rglob("*") if path.parent.name == "d"]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data)


def link(directory):
    (directory / "revision" / "more").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (corrupt, "damaged|cannot be read"),
        (link, "revision/more is no regular file"),
        (lambda d: shutil.rmtree(d / "adapter" / "d"), "cannot be read"),
    ],
)
def test_a_strangers_checkpoint_is_refused_with_its_reason(change, says, tmp_path):
    orbax_files.write(tmp_path / "it", packed(1), {})
    with pytest.raises(UserError, match="64 bytes, and 63 are allowed"):
        orbax_files.read(tmp_path / "it", 63)
    change(tmp_path / "it")
    with pytest.raises(UserError, match=says):
        orbax_files.read(tmp_path / "it", 1 << 30)
