"""PEFT directories: what we write loads in PEFT, what PEFT writes loads here, and what cannot be
imported is refused by name.
"""

import dataclasses
import re
import shutil
import warnings

import chex
import ml_dtypes
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from mint_jax.errors import UserError
from mint_jax.lora import peft as peft_lib
from mint_jax.lora import tree
from mint_jax.lora.peft import CONFIG, ONLY, WEIGHTS, is_peft, read_peft, write_peft
from mint_jax.lora.tree import LINEAR_TARGETS, AdapterConfig
from mint_jax.models import hf, transformer
from tests import oracles
from tests.adapters import random_adapter
from tests.exchange import (
    assert_same_logits,
    decided_tokens,
    edit_config,
    edit_tensors,
    looser,
    our_logits,
    peft_model,
    randomise,
    tables,
)

LAYER0_Q = "base_model.model.model.layers.0.self_attn.q_proj"


EXPORTS = [
    ("llama_bias", AdapterConfig(3, 5.0, LINEAR_TARGETS)),
    ("qwen3", AdapterConfig(5, 7.0, ("q", "down", "embed", "unembed"), rslora=True)),
    ("llama_tied", AdapterConfig(2, 3.0, ("v", "unembed"))),
    ("qwen3_moe", AdapterConfig(3, 5.0, LINEAR_TARGETS, rslora=True)),
    ("qwen3_moe", AdapterConfig(2, 3.0, ("router", "gate", "up", "down"))),
    ("qwen3_moe", AdapterConfig(4, 2.0, ("down",))),
    ("gpt_oss", AdapterConfig(3, 5.0, (tree.ALL_LINEAR, "router"), rslora=True)),
    ("gpt_oss", AdapterConfig(4, 2.0, ("q", "down"))),
    # each expert's copy of a shared factor
    ("qwen3_moe", AdapterConfig(3, 5.0, LINEAR_TARGETS, experts="shared_outer")),
    ("deepseek_v3", AdapterConfig(3, 5.0, (tree.ALL_LINEAR,), True, "shared_outer")),
    ("llama", AdapterConfig(kind="bias")),
    ("llama_bias", AdapterConfig(kind="bias", targets=("q", "down"))),
    ("qwen3_5", AdapterConfig(3, 5.0, (tree.ALL_LINEAR,))),
    ("qwen3_5_moe", AdapterConfig(3, 5.0, (tree.ALL_LINEAR, "router"), rslora=True)),
    ("qwen3_next", AdapterConfig(3, 5.0, (tree.ALL_LINEAR,))),
    ("nemotron_h", AdapterConfig(3, 5.0, (tree.ALL_LINEAR, "embed", "router"))),
    ("nemotron_h", AdapterConfig(2, 5.0, ("up", "in", "q"), rslora=True)),
    ("nemotron_h_dense", AdapterConfig(2, 5.0, ("up", "in", "q"))),
    pytest.param(
        *("kimi_linear", AdapterConfig(3, 5.0, (tree.ALL_LINEAR, "router"))), marks=pytest.mark.long
    ),
    ("gemma4_shared", AdapterConfig(3, 5.0, (tree.ALL_LINEAR, "embed"))),
    ("gemma4_moe", AdapterConfig(3, 5.0, ("q", "down", "router"), rslora=True)),
    # a dense layer and shared experts beside routed ones
    ("deepseek_v3", AdapterConfig(3, 5.0, (tree.ALL_LINEAR,))),
    # PEFT takes the names of MLPs for those of experts by the type of the model
    ("glm_dense", AdapterConfig(3, 5.0, ("o", "gate", "up", "down"))),
    ("deepseek_v3_dense", AdapterConfig(3, 5.0, ("o", "gate", "up", "down"), rslora=True)),
]


@pytest.mark.parametrize(("family", "config"), EXPORTS)
def test_peft_loads_what_we_write_and_reading_it_back_is_exact(
    family, config, rng, tiny_base, hf_dirs, tmp_path
):
    base = tiny_base(family)
    adapter, (names, shapes) = random_adapter(rng, base, config), tables(base)
    is_moe = hf.is_moe_type(base.cfg)
    write_peft(tmp_path / "out", adapter, config, names, str(hf_dirs(family)), is_moe)
    model = peft_model(hf_dirs(family), tmp_path / "out")
    tokens_BT = decided_tokens(model, base.cfg, rng)
    bare = oracles.torch_logits(oracles.torch_model(hf_dirs(family)), tokens_BT)
    ours, theirs = (
        our_logits(base, adapter, config, tokens_BT),
        oracles.torch_logits(model, tokens_BT),
    )
    assert_same_logits(ours, theirs, bare, looser(base.cfg))
    back, read = read_peft(tmp_path / "out", names, shapes)
    assert read == dataclasses.replace(config, targets=read.targets, experts="each")
    # as jobs export it: its digest depends on the order
    assert read.targets == tree.spelled_out(config, transformer.abstract(base.cfg)).targets
    chex.assert_trees_all_equal(back, tree.expanded(adapter))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"], "nothing of the staging may stay"


# names of Megatron-Bridge, with which Miles trains
MILES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def take_experts(tensors, layout, layer, name, factor, E):
    """Removes a factor of a layer's experts, ``[E, ...]``, or ``[1, ...]`` if they share it."""
    owner, end = f"base_model.model.model.layers.{layer}.mlp.experts", f"lora_{factor}.weight"
    if layout == "miles":
        name = MILES[name]
        if f"{owner}.0.{name}.{end}" in tensors:
            return np.stack([tensors.pop(f"{owner}.{e}.{name}.{end}") for e in range(E)])
    return tensors.pop(f"{owner}.{name}.{end}")


@pytest.mark.parametrize(
    ("form", "layout"), [("shared_outer", "sglang"), ("each", "sglang"), ("shared_outer", "miles")]
)
def test_experts_are_written_and_read_with_the_names_of_others(
    form, layout, rng, tiny_base, tmp_path
):
    base = tiny_base("qwen3_moe")
    config = AdapterConfig(3, 5.0, ("q", "gate", "up", "down"), experts=form)
    adapter, (names, shapes) = random_adapter(rng, base, config), tables(base)
    write_peft(tmp_path / "out", adapter, config, names, layout=layout)
    back, read = read_peft(tmp_path / "out", names, shapes)
    assert read == config
    chex.assert_trees_all_equal(back, adapter)
    E, F, D = base.cfg.experts.count, base.cfg.experts.width, base.cfg.d_model
    one, own = 1 if form == "shared_outer" else E, adapter["moe"]["moe"]["experts"]
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    for layer in range(base.cfg.stacks["moe"]):
        into, back_to = ((one, 3, D), (E, F, 3)), ((E, 3, F), (one, D, 3))
        for name, ours, (a, b) in (
            *(("w1", "gate", into), ("w3", "up", into), ("w2", "down", back_to)),
        ):
            pair = own.get("shared_outer", own)[ours]
            got_a, got_b = (take_experts(tensors, layout, layer, name, f, E) for f in "AB")
            assert (got_a.shape, got_b.shape) == (a, b)
            np.testing.assert_array_equal(got_a, pair["a"][layer].reshape(a))
            want = pair["b"][layer].reshape(b[0], 3, b[1]).swapaxes(1, 2)
            np.testing.assert_array_equal(got_b, want)
    assert all(".q_proj." in name for name in tensors)
    key = "base_model.model.model.layers.0.mlp.experts.w2.lora_"
    tensors |= {f"{key}A.weight": got_a[:, :2], f"{key}B.weight": got_b}
    save_file(tensors, tmp_path / "out" / WEIGHTS)
    with pytest.raises(UserError, match=r"experts\.w2 has lora_A"):
        read_peft(tmp_path / "out", names, shapes)


def test_an_adapter_of_a_class_of_several_media_is_read(rng, tiny_base, tmp_path):
    """With the names that PEFT takes from the modules of transformers' class."""
    base, config = tiny_base("qwen3_5"), AdapterConfig(3, 5.0, (tree.ALL_LINEAR,))
    adapter, (names, shapes) = random_adapter(rng, base, config), tables(base)
    write_peft(tmp_path / "out", adapter, config, names)
    with torch.device("meta"):
        text = transformers.AutoConfig.from_pretrained(base.cfg.directory)
        cls = transformers.Qwen3_5ForConditionalGeneration
        model = cls(transformers.Qwen3_5Config(text_config=text.to_dict()))
    theirs = {name for name, _ in model.named_modules() if "visual" not in name}

    def renamed(tensors):
        for name in list(tensors):
            module = re.sub(r"^base_model\.model\.model\.", "model.language_model.", name)
            assert module.rsplit(".lora_", 1)[0] in theirs
            tensors[f"base_model.model.{module}"] = tensors.pop(name)

    edit_tensors(tmp_path / "out", renamed)
    back, read = read_peft(tmp_path / "out", names, shapes)
    chex.assert_trees_all_equal(back, adapter)
    assert read.rank == config.rank


TWO = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def written_once(hf_dirs, tmp_path_factory):
    made, config = tmp_path_factory.mktemp("peft"), peft.LoraConfig(r=4, target_modules=TWO)
    peft.get_peft_model(oracles.torch_model(hf_dirs("llama_bias")), config).save_pretrained(made)
    return made


@pytest.fixture
def directory(written_once, tmp_path):
    """A sound directory by PEFT, rank 4 on q_proj and down_proj, to be spoilt."""
    return shutil.copytree(written_once, tmp_path / "peft")


REFUSED_FIELDS = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
    ({"a_feature_of_next_year": True}, "is True, which is unknown: remove the field if"),
    # the lists leave out what the file has, so PEFT would drop it
    ({"target_modules": ["q_proj"]}, r"mlp.down_proj, but target_modules in .* is \['q_proj'\]"),
    ({"exclude_modules": ["1.self_attn.q_proj"]}, "layers.1.self_attn.q_proj, but exclude_modules"),
    ({"modules_to_save": ["down_proj"]}, "layers.0.mlp.down_proj, but modules_to_save"),
    ({"layers_to_transform": [0, 2]}, r"but layers_to_transform in .* is \[0, 2\]"),
    ({"target_parameters": ["experts.down_proj"]}, r"target_parameters is \['experts.down_proj'\]"),
    ({"r": 5}, "q_proj has rank 4, but adapter_config.json says 5"),
    ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, "has rank 4, but .* says 2"),
    # what changes the base or the delta, so that the factors alone would serve wrong logits
    *(({field: "other"}, f"{field} is 'other'") for field in ONLY),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"lora_bias": True}, "self_attn.q_proj has factors that are not zero, or no bias"),
]


@pytest.mark.parametrize(
    ("fields", "message"),
    REFUSED_FIELDS,
    ids=[f"{n}={v}" for f, _ in REFUSED_FIELDS for n, v in f.items()],
)
def test_features_that_change_the_outputs_are_refused(fields, message, directory, tiny_base):
    edit_config(directory, **fields)
    with pytest.raises(UserError, match=message):
        read_peft(directory, *tables(tiny_base("llama_bias")))


def test_every_field_of_peft_is_read_or_refused_or_without_effect():
    """A field of a new release of PEFT fails here until it is decided on."""
    known = [*peft_lib.READ, *ONLY, *peft_lib.NO_EFFECT]
    assert sorted(known) == sorted(f.name for f in dataclasses.fields(peft.LoraConfig))
    defaults = peft.LoraConfig().to_dict()
    for field, supported in ONLY.items():
        assert defaults[field] in supported, "what PEFT writes by default is never refused"


CARRIED = {  # LoraConfig's fields
    "embedding adapted": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
@pytest.mark.parametrize("fields", CARRIED.values(), ids=CARRIED)
def test_weights_of_the_base_in_a_file_are_compared_with_the_base(
    fields, family, rng, tiny_base, hf_dirs, tmp_path
):
    base, tokens_BT = tiny_base(family), rng.integers(0, 97, (1, 7))
    names, shapes = tables(base)
    torch.manual_seed(int(rng.integers(2**31)))
    config = peft.LoraConfig(r=4, **fields)
    model = randomise(peft.get_peft_model(oracles.torch_model(hf_dirs(family)), config).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "same")
    carried = [name for name in load_file(tmp_path / "same" / WEIGHTS) if ".lora_" not in name]
    assert carried, "nothing of the base is in the file"
    adapter, config = read_peft(tmp_path / "same", names, shapes)
    bare = oracles.torch_logits(oracles.torch_model(hf_dirs(family)), tokens_BT)
    theirs = oracles.torch_logits(peft_model(hf_dirs(family), tmp_path / "same"), tokens_BT)
    assert_same_logits(our_logits(base, adapter, config, tokens_BT), theirs, bare)
    with pytest.raises(UserError, match="is not a LoRA factor of this base"):
        read_peft(tmp_path / "same", dict(names), shapes)  # nothing to compare with

    def changed(name, of):
        directory = shutil.copytree(tmp_path / "same", tmp_path / "changed", dirs_exist_ok=True)
        edit_tensors(directory, lambda t: t.update({name: of(t[name])}))
        return read_peft(directory, names, shapes)[0]

    for name in carried:
        # the base as a program in bfloat16 saves it
        chex.assert_trees_all_equal(changed(name, lambda x: x.astype(ml_dtypes.bfloat16)), adapter)
        with pytest.raises(UserError, match=f"'{name}' differs from the base's .*: the adapter"):
            changed(name, lambda x: x + (np.arange(x.size) == 7).reshape(x.shape))


A, B = (f"{LAYER0_Q}.lora_{factor}.weight" for factor in "AB")
STRANGE = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"


OTHER, NARROW = {STRANGE: np.ones((4, 48), np.float32)}, {B: np.ones((64, 3), np.float32)}


def _tensors(change):
    return lambda directory: edit_tensors(directory, change)


def _file(name, content):
    """Removes a file if ``content`` is None."""
    return lambda d: (d / name).unlink() if content is None else (d / name).write_bytes(content)


REFUSED = {  # words of the error -> change of a sound directory
    "q_proj has only one of lora_A and lora_B": _tensors(lambda t: t.pop(B)),
    "no module of the adapter binds to this base": _tensors(lambda t: t.clear()),
    f"'{STRANGE}' is not a LoRA factor of this base": _tensors(lambda t: t.update(OTHER)),
    "dense/attn/q/b has NaN or infinite": _tensors(lambda t: t[B].__setitem__((2, 1), np.nan)),
    r"q_proj has lora_A \(4, 48\) and lora_B \(64, 3\)": _tensors(lambda t: t.update(NARROW)),
    "adapter_config.json does not exist: a PEFT adapter is a directory": _file(CONFIG, None),
    "adapter_config.json is not valid JSON": _file(CONFIG, b'{"peft_type": "LORA",'),
    "adapter_model.safetensors cannot be read": _file(WEIGHTS, b"\x10\x00\x00"),
}


@pytest.mark.parametrize(("message", "change"), REFUSED.items(), ids=REFUSED)
def test_files_that_do_not_fit_are_refused(message, change, directory, tiny_base):
    change(directory)
    assert is_peft(directory) == (directory / CONFIG).is_file()
    with pytest.raises(UserError, match=message):
        read_peft(directory, *tables(tiny_base("llama_bias")))


def test_a_directory_in_use_is_not_overwritten_and_an_empty_one_is_filled(rng, tiny_base, tmp_path):
    base, config = tiny_base("llama_bias"), AdapterConfig(2, targets=("q",))
    adapter, (names, shapes) = random_adapter(rng, base, config), tables(base)
    (tmp_path / "out").mkdir()
    write_peft(tmp_path / "out", adapter, config, names)
    with pytest.raises(UserError, match="out is not empty: choose a new directory, or remove it"):
        write_peft(tmp_path / "out", random_adapter(rng, base, config), config, names)
    chex.assert_trees_all_equal(read_peft(tmp_path / "out", names, shapes)[0], adapter)
