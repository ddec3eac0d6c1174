"""Safetensors checkpoints: read whole or in shards, whatever the dtype; written back; and every way
a directory can be wrong.
"""

import json
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from chex import assert_trees_all_equal as _equal

from mint_jax import params as params_lib
from mint_jax.lora.config import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.models import hf, transformer
from mint_jax.models.hf_config import read_config
from mint_jax.models.outline import outline
from tests import oracles
from tests.exchange import our_logits
from tests.models.hf_config_test import message


def _load(directory, mesh, dtype=np.float32):
    return hf.load(directory, read_config(directory), mesh, dtype)


@pytest.fixture
def ckpt(hf_dirs, tmp_path):
    """A copy of the tiny llama that a test may spoil."""
    return shutil.copytree(hf_dirs("llama"), tmp_path / "ckpt")


@pytest.fixture(scope="module")
def even_dir(tmp_path_factory):
    """A tiny llama whose dimensions all divide by 8, for meshes of eight devices."""
    directory = tmp_path_factory.mktemp("even")
    name, changes = oracles.TINY["llama"]
    changes = changes | {"vocab_size": 96, "head_dim": 32, "num_key_value_heads": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(oracles.TINY, "even", (name, changes))
        return oracles.save_tiny("even", directory)


def test_indexed_shards_load_as_one_file_does(hf_dirs, tmp_path, mesh):
    directory = oracles.save_tiny("qwen3", tmp_path, max_shard_size="20KB")
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    _equal(_load(directory, mesh), _load(hf_dirs("qwen3"), mesh))
    # several files without an index are read all the same
    (directory / "model.safetensors.index.json").unlink()
    _equal(_load(directory, mesh), _load(hf_dirs("qwen3"), mesh))


@pytest.mark.parametrize("name", oracles.TINY)
def test_transformers_loads_what_save_writes(name, tmp_path, hf_dirs, rng):
    cfg = read_config(hf_dirs(name))
    params = jax.tree.map(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32), transformer.abstract(cfg)
    )
    hf.save(params, cfg, tmp_path)
    shutil.copy(hf_dirs(name) / "config.json", tmp_path)
    # in memory transformers keeps experts fused
    oracles.torch_model(tmp_path).save_pretrained(tmp_path / "theirs")
    state = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    state = {name.replace("backbone.", "model."): x for name, x in state.items()}
    if cfg.family == "kimi_linear":  # saved under published names
        saved = hf.Checkpoint(tmp_path / "theirs")
        state = {name: torch.from_numpy(saved.tensor(name)[:]) for name in saved.files}
    written = dict(hf.tensors(params, cfg))
    assert set(state) == set(written)
    for key, value in written.items():
        np.testing.assert_array_equal(state[key].numpy(), value, err_msg=key)


class _Counting:
    """A tensor's lazy slice that notes what is read from it."""

    def __init__(self, name, part, reads):
        self.name, self.part, self.reads = name, part, reads

    def get_shape(self):
        return self.part.get_shape()

    def get_dtype(self):
        return self.part.get_dtype()

    def __getitem__(self, index):
        value = self.part[index]
        self.reads[self.name].setdefault(tuple((s.start, s.stop) for s in index), value.nbytes)
        return value


def test_loading_on_eight_devices_reads_only_their_slices(even_dir, mesh, mesh8, monkeypatch):
    cfg = read_config(even_dir)
    whole = hf.load(even_dir, cfg, mesh)
    reads, tensor = {}, hf.Checkpoint.tensor

    def counting(self, name):
        reads.setdefault(name, {})
        return _Counting(name, tensor(self, name), reads)

    monkeypatch.setattr(hf.Checkpoint, "tensor", counting)
    progress = []
    sharded = hf.load(even_dir, cfg, mesh8, progress=lambda *bytes_: progress.append(bytes_))
    _equal(sharded, whole)
    ways = {
        path: array.size // array.addressable_shards[0].data.size
        for path, array in params_lib.leaves_with_path(sharded)
    }
    assert ways["dense/attn/q/w"] == 4
    assert len(sharded["dense"]["attn"]["q"]["w"].sharding.device_set) == 8
    specs = transformer.abstract(cfg)
    for path, spec in params_lib.leaves_with_path(specs):
        source = hf.source_of(path, spec, cfg)
        for name in source.names:
            each = set(reads[name].values())
            # no read is larger than a shard
            assert each == {spec.nbytes // len(source.names) // ways[path]}, name
            assert len(reads[name]) == ways[path], name  # and together they are the tensor, once
    total = params_lib.nbytes(specs)
    assert sum(sum(parts.values()) for parts in reads.values()) == total
    assert [done for done, _ in progress] == sorted({done for done, _ in progress})
    assert progress[-1] == (total, total)


def _rewrite(directory, change):
    """``change`` alters the dict of a file's tensors, or gives another."""
    file = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors = change(tensors) or tensors
    safetensors.torch.save_file(
        {name: x.contiguous() for name, x in tensors.items()}, file, metadata={"format": "pt"}
    )


UP = "model.layers.1.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj"


def _config(**fields):
    def change(d):
        path = d / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _tensor(name, x):
    return lambda d: _rewrite(d, lambda t: t.update({name: x}))


def _bytes(keep):
    def change(d):
        file = d / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])

    return change


DAMAGED = {  # words of the error -> change of a sound directory
    f"no tensor '{UP}'": lambda d: _rewrite(
        d, lambda t: {name: x for name, x in t.items() if name != UP}
    ),
    "shape (80, 48) but config.json needs (88, 48)": _config(intermediate_size=88),
    "no tensor 'model.layers.3.input_layernorm.weight'": _config(num_hidden_layers=4),
    "has no *.safetensors": lambda d: (d / "model.safetensors").unlink(),
    "is not a readable safetensors file": _bytes(5),
    "not a readable safetensors file": _bytes(-1),
    "the first is 'score.weight'": _tensor("score.weight", torch.ones(2, 48)),
    f"the first is '{Q}.bias'": _tensor(f"{Q}.bias", torch.ones(64)),
    f"the first is '{Q}.lora_A.weight'": _tensor(f"{Q}.lora_A.weight", torch.ones(4, 48)),
    "the first is 'model.layers.3.input_layernorm.weight'": _tensor(
        "model.layers.3.input_layernorm.weight", torch.ones(48)
    ),
    "stored as I8; expected one of F64, F32, F16, BF16": _tensor(
        UP, torch.ones(80, 48, dtype=torch.int8)
    ),
}


@pytest.mark.parametrize(("words", "change"), DAMAGED.items(), ids=DAMAGED)
def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(words, change, ckpt, mesh):
    change(ckpt)
    begun = []
    told = message(
        lambda: hf.load(ckpt, read_config(ckpt), mesh, progress=lambda *_: begun.append(1))
    )
    assert words in told
    assert not begun


def test_an_index_that_contradicts_its_files_is_refused(tmp_path, mesh):
    directory = oracles.save_tiny("llama", tmp_path / "indexed", max_shard_size="20KB")
    index = directory / hf.INDEX
    files = json.loads(index.read_text())["weight_map"]
    last = files["model.norm.weight"]
    for text, words in (
        ('{"weight_map": {', "is not a safetensors index"),
        (json.dumps({"weight_map": files | {"lm_head.weight": "../x.safetensors"}}), "is not a"),
        (json.dumps({"weight_map": files | {"lm_head.bias": last}}), "'lm_head.bias', which it"),
        (json.dumps({"weight_map": files | {"lm_head.bias": "gone"}}), "gone is named by model."),
    ):
        index.write_text(text)
        assert words in message(_load, directory, mesh)


def test_a_head_that_differs_from_the_embedding_is_used_though_the_config_ties_them(
    rng, hf_dirs, tmp_path, mesh, caplog
):
    directory = shutil.copytree(hf_dirs("llama_tied"), tmp_path / "head")
    _rewrite(directory, lambda t: t.update({hf.HEAD: t[hf.EMBED].roll(1, 0)}))
    tokens_BT = rng.integers(0, 97, (1, 9))
    theirs = oracles.torch_logits(oracles.torch_model(directory), tokens_BT)
    ours = our_logits(base_lib.load(str(directory), mesh), {}, AdapterConfig(1), tokens_BT)
    # float32 sums, in another order
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    assert "lm_head.weight differs from the embedding and is used" in caplog.text
    assert outline(str(directory)).cfg == hf.read_model(directory)
    assert not hf.read_model(directory).tie_embeddings
    assert "'lm_head.weight'" in message(_load, directory, mesh)  # whoever loads it tied
    _rewrite(directory, lambda t: t.update({hf.HEAD: t[hf.EMBED].clone()}))
    assert hf.read_model(directory).tie_embeddings
    _load(directory, mesh)


def test_either_of_two_tied_tensors_stands_for_both(hf_dirs, tmp_path, mesh):
    """The ``save_model`` of safetensors keeps the head's name only."""
    directory = shutil.copytree(hf_dirs("llama_tied"), tmp_path / "head")
    _rewrite(directory, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    np.testing.assert_array_equal(
        oracles.torch_model(directory).model.embed_tokens.weight.detach(),
        _load(directory, mesh)["embed"]["w"],
    )
    assert hf.read_model(directory).tie_embeddings
    _equal(_load(directory, mesh), _load(hf_dirs("llama_tied"), mesh))


@pytest.mark.parametrize("prefix", [p for p in hf.PREFIXES if p != "model."])
def test_names_below_another_prefix_are_the_same_tensors(prefix, hf_dirs, ckpt, mesh):
    def renamed(name):
        head = name.startswith("lm_head")
        return hf.PREFIXES[prefix] + name if head else prefix + name.removeprefix("model.")

    _rewrite(ckpt, lambda tensors: {renamed(name): x for name, x in tensors.items()})
    _equal(_load(ckpt, mesh), _load(hf_dirs("llama"), mesh))


_PICTURES = "vision_tower.w", "multi_modal_projector.w"
_BELOW = "model.language_model."
# published files have keys of layers that share another's
_GEMMA4 = *_PICTURES, "model.embed_vision.w", f"{_BELOW}layers.5.self_attn.k_proj.weight"
_MORE = "model.visual.patch_embed.proj.weight", "mtp.fc.weight"
MEDIA = [  # family, class, prefix of the text's tensors, others
    ("gemma3", "Gemma3", "language_model.model.", _PICTURES),
    ("ministral3", "Mistral3", _BELOW, _PICTURES),
    ("gemma4_shared", "Gemma4", _BELOW, _GEMMA4),
    ("qwen3_5", "Qwen3_5", _BELOW, _MORE),
    ("qwen3_5_moe", "Qwen3_5Moe", _BELOW, _MORE),
]


@pytest.mark.parametrize(("family", "name", "prefix", "others"), MEDIA)
def test_a_checkpoint_of_several_media_is_read_for_its_text(
    family, name, prefix, others, hf_dirs, tmp_path, mesh
):
    """As published: nested ``text_config``, other names, experts of a layer in one tensor, tensors
    of pictures and of prediction.
    """
    source, directory = hf_dirs(family), shutil.copytree(hf_dirs(family), tmp_path / "base")
    text = json.loads((source / "config.json").read_text())
    del text["architectures"]
    outer = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": "other"}
    outer |= {"text_config": text, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(outer))

    def published(tensors):
        if family == "qwen3_5_moe":
            tensors = oracles.torch_model(source).state_dict()  # experts fused
        renamed = {re.sub("^model[.]", prefix, one): x for one, x in tensors.items()}
        return renamed | {one: torch.ones(2) for one in others}

    _rewrite(directory, published)
    cfg = hf.read_model(directory)
    assert cfg.replace(directory=None) == hf.read_model(source).replace(directory=None)
    _equal(*(hf.load(folder, cfg, mesh) for folder in (directory, source)))
    if family == "qwen3_5_moe":
        fused = hf.Checkpoint(directory).tensor("model.layers.1.mlp.experts.2.up_proj.weight")
        np.testing.assert_array_equal(fused[3:9, 1:], fused[:][3:9, 1:])
        _rewrite(directory, lambda t: {n: x[:, 1:] if "gate_up" in n else x for n, x in t.items()})
        told = message(hf.load, directory, cfg, mesh)
        assert "expected experts, rows of gate_proj and up_proj" in told


LAYER = "model.layers"
HARMLESS = [
    ("llama", {f"{LAYER}.1.self_attn.rotary_emb.inv_freq": (8,), "v_head.summary.weight": (1, 48)}),
    # multi-token prediction, and an indexer that is not asked
    ("moonlight", {f"{LAYER}.3.eh_proj.weight": (48, 96), f"{LAYER}.3.enorm.weight": (48,)}),
    ("glm_dense", {f"{LAYER}.1.self_attn.indexer.wk.weight": (14, 48)}),
]


@pytest.mark.parametrize(("family", "extra"), HARMLESS)
def test_tensors_without_a_part_in_logits_are_left_out(family, extra, hf_dirs, tmp_path, mesh):
    directory = shutil.copytree(hf_dirs(family), tmp_path / "extra")
    ones = {name: torch.ones(shape) for name, shape in extra.items()}
    _rewrite(directory, lambda t: t.update(ones))
    _equal(_load(directory, mesh), _load(hf_dirs(family), mesh))
    plain, more = (
        oracles.torch_logits(oracles.torch_model(d), np.arange(12)[None])
        for d in (hf_dirs(family), directory)
    )
    np.testing.assert_array_equal(more, plain)


def test_fingerprints_tell_weights_and_configs_apart(hf_dirs, ckpt):
    whole, file = hf.fingerprint(hf_dirs("llama")), ckpt / "model.safetensors"
    _config(transformers_version="0", _name_or_path="elsewhere", dtype="bfloat16")(ckpt)
    assert hf.fingerprint(ckpt) == whole != hf.fingerprint(hf_dirs("llama_tied"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = hf.fingerprint(ckpt)
    assert other != whole
    _config(rms_norm_eps=1e-6)(ckpt)
    assert hf.fingerprint(ckpt) not in (whole, other)
