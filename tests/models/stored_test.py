"""A base that stays as its checkpoint has it, in blocks or in 16 bits: its numbers, its gradients,
and when it is held otherwise.
"""

import shutil

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import gguf as gguf_lib
from mint_jax.models import hf, stored
from mint_jax.models.config import Kernels
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.marks import first
from tests.models.gguf_files import write

D, F, V = 64, 128, 64


def converted(folder, rng, kind="Q4_1", table="Q8_0", ffw=F, tied=True):
    folder.mkdir(exist_ok=True)
    kinds, file = gguf.GGMLQuantizationType, folder / "tiny.gguf"
    write(file, rng, tied, kinds[kind], table=kinds[table], F=ffw, heads=(4, 4), V=V)
    return gguf_lib.convert(file, folder / "tiny")


@pytest.fixture(scope="module", params=first(1, [True, False]), ids=["tied", "untied"])
def directory(request, tmp_path_factory):
    """A tiny checkpoint converted from layers of 4 bits and tables of 8."""
    folder = tmp_path_factory.mktemp("blocked")
    return converted(folder, np.random.default_rng(), tied=request.param)


@pytest.fixture(scope="module")
def both(directory, mesh):
    """The base in blocks, and in float32."""
    return base_lib.load(str(directory), mesh), base_lib.load(str(directory), mesh, as_stored=False)


@pytest.fixture(scope="module", params=first(1, ["qwen3", "llama_bias", "qwen3_moe", "glm_dense"]))
def sixteen(request, hf_dirs, mesh, tmp_path_factory):
    """A tiny checkpoint in bfloat16, held so and in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    base = base_lib.load(str(hf_dirs(request.param)), mesh, "bfloat16")
    hf.save(base.params, base.cfg, folder)
    shutil.copy(hf_dirs(request.param) / "config.json", folder)
    return base_lib.load(str(folder), mesh), base_lib.load(str(folder), mesh, as_stored=False)


def test_in_sixteen_bits_training_and_sampling_have_the_bits_of_float32(sixteen, rng):
    V = sixteen[0].cfg.vocab_size
    _assert_same_training(sixteen, rng, ("all-linear",))
    requests = [
        Request(tuple(rng.integers(3, V, n).tolist()), max_tokens=8, temperature=1.0, seed=n)
        for n in (1, 5, 17)
    ]
    for [mine], [other] in zip(*(Engine(base).generate(requests) for base in sixteen), strict=True):
        assert (mine.tokens, mine.logprobs) == (other.tokens, other.logprobs)


def _trained(base, groups, targets):
    """The state after two updates."""
    config = PolicyConfig("p", AdapterConfig(4, 8.0, targets), loss=LossConfig("cross_entropy"))
    trainer = Trainer(base, [config])
    for _ in range(2):
        trainer.update(groups)
    return [np.array(leaf) for leaf in jax.tree.leaves(trainer.state)]


def _assert_same_training(bases, rng, targets):
    V = bases[0].cfg.vocab_size
    sequences = [TrainSequence(rng.integers(3, V, 7).tolist(), [1.0] * 7) for _ in range(2)]
    groups = {"p": [Group(rng.integers(3, V, 5).tolist(), sequences)]}
    ours, full = (_trained(base, groups, targets) for base in bases)
    assert all(np.isfinite(leaf).all() for leaf in ours if leaf.dtype == np.float32)
    for mine, other in zip(ours, full):
        assert mine.tobytes() == other.tobytes()


def test_training_has_the_bits_of_float32(both, rng):
    """Forward, backward and optimizer, where adapters need the logits' own gradient."""
    _assert_same_training(both, rng, ("all-linear", "embed", "unembed"))


def test_what_it_does_not_serve_is_held_in_full(directory, mesh, monkeypatch):
    def kinds(*args, **kwargs):
        params = base_lib.load(str(directory), *args, **kwargs).params
        return {
            leaf.dtype for path, leaf in params_lib.leaves_with_path(params) if path.endswith("/w")
        }

    assert kinds(mesh) == {np.dtype(np.uint8)}
    full = {jnp.dtype("float32")}
    assert kinds(mesh, as_stored=False) == full
    assert kinds(make_mesh({"data": 2}, jax.devices()[:2])) == full
    assert kinds(mesh, kernels=Kernels(layer_matmul="xla")) == full
    assert kinds(mesh, "bfloat16") == {jnp.dtype("bfloat16")}
    assert kinds(mesh, quantise="int8") == {jnp.dtype("int8"), jnp.dtype("float32")}

    def no_compiler():
        raise NotImplementedError("no C++ compiler found")

    monkeypatch.setattr(stored.native, "require", no_compiler)
    assert kinds(mesh) == full
    assert (
        stored.reason_against(jnp.float32, "", jax.devices()[:1], "auto") == "no C++ compiler found"
    )


OTHERS = [("Q8_0", "Q8_0", 128), ("Q4_1", "Q8_0", 96), ("F16", "F16", 128)]


@pytest.mark.parametrize(("kind", "table", "ffw"), OTHERS)
def test_files_of_other_kinds_keep_what_fits(tmp_path, mesh, rng, kind, table, ffw):
    base = base_lib.load(str(converted(tmp_path, rng, kind, table, ffw)), mesh)
    held = {
        path: leaf.dtype == np.uint8
        for path, leaf in params_lib.leaves_with_path(base.params)
        if path.endswith("/w")
    }
    assert held.pop("embed/w") == (table == "Q8_0")
    assert set(held.values()) == {kind == "Q4_1" and ffw == 128}  # all of them or none


def test_blocks_of_other_weights_are_refused(tmp_path, mesh, rng):
    one, other = (converted(tmp_path / name, rng) for name in ("one", "other"))
    (one / stored.FILE).write_bytes((other / stored.FILE).read_bytes())
    with pytest.raises(UserError, match="has other weights than its checkpoint: remove it"):
        base_lib.load(str(one), mesh)
    (one / stored.FILE).write_bytes(b"cut short")
    with pytest.raises(UserError, match="cannot be read"):
        base_lib.load(str(one), mesh)
    assert base_lib.load(str(one), mesh, as_stored=False).weights == "float32"
