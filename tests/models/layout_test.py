"""A base in the layout of a mesh: its checkpoint's numbers, resumed, verified, read in parts."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import hf, layout
from mint_jax.models.base import DTYPES

SIZES = {"fsdp": 4, "expert": 2}


def convert(source: Path, directory: Path, dtype: str = "float32", quantise: str = "", **kw: Any):
    return layout.write(
        source, directory, hf.read_model(source), SIZES, DTYPES[dtype], quantise, **kw
    )


def assert_same(base: base_lib.Base, other: base_lib.Base) -> None:
    jax.tree.map(np.testing.assert_array_equal, base.params, other.params)


@pytest.mark.parametrize(
    ("name", "dtype", "quantise"),
    [
        ("qwen3_moe", "float32", ""),
        ("qwen3_moe", "bfloat16", "int8"),
        ("qwen3_moe", "float32", "float8"),
        ("deepseek_v3", "bfloat16", ""),
        ("llama_tied", "float32", ""),
        ("glm", "float32", ""),
    ],
)
def test_a_conversion_has_the_numbers_of_its_checkpoint(
    name, dtype, quantise, hf_dirs, tmp_path, mesh
):
    source = hf_dirs(name)
    size = convert(source, tmp_path / "base", dtype, quantise)
    for devices in (mesh, make_mesh(SIZES), make_mesh({"data": 4, "fsdp": 2})):
        ours = base_lib.load(str(tmp_path / "base"), devices, dtype, quantise=quantise)
        theirs = base_lib.load(str(source), devices, dtype, quantise=quantise, as_stored=False)
        assert ours.fingerprint == theirs.fingerprint
        assert ours.nbytes == size
        assert_same(ours, theirs)


def test_a_device_reads_only_its_chunks(hf_dirs, tmp_path, monkeypatch):
    convert(hf_dirs("qwen3_moe"), tmp_path / "base")
    reads: list[tuple[str, int]] = []
    opened = layout._open

    class Counting:
        def __init__(self, path: str, store: Any):
            self.path, self.store = path, store

        def __getitem__(self, index: Any) -> Any:
            part = self.store[index]
            reads.append((self.path, part.size))
            return part

    def counting(directory, path, spec, chunk):
        return Counting(path, opened(directory, path, spec, chunk))

    monkeypatch.setattr(layout, "_open", counting)
    base = base_lib.load(str(tmp_path / "base"), make_mesh(SIZES))
    for path, array in params_lib.leaves_with_path(base.params):
        shard = array.addressable_shards[0].data.size
        assert {size for at, size in reads if at == path} == {shard}, path
    experts = tmp_path / "base" / "arrays" / "moe" / "moe" / "experts" / "gate" / "w" / "c"
    assert len([f for f in experts.rglob("*") if f.is_file()]) == 8


def test_a_stopped_conversion_continues_and_is_not_a_base_before(hf_dirs, tmp_path, mesh):
    source, directory = hf_dirs("qwen3_moe"), tmp_path / "base"

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stopped

    with pytest.raises(Stopped):
        convert(source, directory, progress=stop)
    with pytest.raises(UserError, match="not complete: run the convert job again"):
        base_lib.load(str(directory), mesh)
    before = {f: f.stat().st_mtime_ns for f in directory.rglob("c/**/*") if f.is_file()}
    assert before
    with pytest.raises(UserError, match="other settings"):
        convert(source, directory, "bfloat16")
    convert(source, directory)
    after = {f: f.stat().st_mtime_ns for f in before}
    # The parameter that was being written is written again, the others are kept.
    assert sum(before[f] == after[f] for f in before) >= len(before) - 8
    whole = base_lib.load(str(source), mesh, as_stored=False)
    assert_same(base_lib.load(str(directory), mesh), whole)


@pytest.fixture(scope="module")
def converted(hf_dirs, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "base"
    convert(hf_dirs("qwen3"), directory)
    return directory


CHUNK = "arrays/dense/attn/q/w/c/0/0/0"


def _flip(directory: Path) -> None:
    data = bytearray((directory / CHUNK).read_bytes())
    data[len(data) // 2] ^= 1
    (directory / CHUNK).write_bytes(data)


def _cut(directory: Path) -> None:
    (directory / CHUNK).write_bytes((directory / CHUNK).read_bytes()[:-10])


def _manifest(**changes: Any):
    def change(directory: Path) -> None:
        found = json.loads((directory / "base.json").read_text())
        (directory / "base.json").write_text(json.dumps(found | changes))

    return change


def _config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))


BAD = {
    "a flipped bit": (_flip, ["dense/attn/q/w", "cannot be read", "convert the base again"]),
    "a truncated chunk": (_cut, ["dense/attn/q/w", "cannot be read"]),
    "a lost chunk": (lambda d: (d / CHUNK).unlink(), ["dense/attn/q/w", "cannot be read"]),
    "a lost parameter": (lambda d: shutil.rmtree(d / "arrays/embed"), ["embed/w cannot be read"]),
    "another config": (_config, ["mlp", "config.json needs"]),
    "another dtype": (_manifest(dtype="bfloat16"), ["'bfloat16'", "--config.dtype=bfloat16"]),
    "8 bits": (_manifest(quantise="int8"), ["--config.quantise=int8"]),
    "no leaves": (_manifest(leaves=None), ["base.json is damaged"]),
    "no JSON": (lambda d: (d / "base.json").write_text("{"), ["base.json is damaged"]),
}


@pytest.mark.parametrize("case", list(BAD))
def test_a_damaged_conversion_is_refused(case, converted, tmp_path, mesh):
    change, words = BAD[case]
    directory = Path(shutil.copytree(converted, tmp_path / "base"))
    change(directory)
    with pytest.raises(UserError) as caught:
        base_lib.load(str(directory), mesh)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_folder_with_other_files_is_not_written_to(hf_dirs, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        convert(hf_dirs("qwen3"), tmp_path)
    cfg = hf.read_model(hf_dirs("qwen3"))
    with pytest.raises(UserError, match="does not divide"):
        layout.write(hf_dirs("qwen3"), tmp_path / "b", cfg, {"fsdp": 5}, jnp.float32)
    assert not (tmp_path / "b").exists()
