"""Files by PEFT's ``save_pretrained`` have PEFT's logits here; damaged files of fused experts are
refused.
"""

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.peft import WEIGHTS, read_peft, write_peft
from mint_jax.lora.tree import LINEAR_TARGETS, AdapterConfig
from mint_jax.models import transformer
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
    tables,
)

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
E, D, F = 8, 48, 40  # the tiny Qwen3-MoE
LAYER0 = "base_model.model.model.layers.0.mlp.experts"


def modules(*names):
    return {"target_modules": list(names)}


def parameters(*names):
    return {"target_parameters": list(names)}


IMPORTS = {  # family, LoraConfig, the rank of what we read
    "dense, all-linear": ("qwen3", {"target_modules": "all-linear", "r": 3, "use_rslora": True}, 3),
    "dense patterns": (
        "llama_bias",
        modules("q_proj", "down_proj")
        | {"rank_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 2}}
        | {"alpha_pattern": {"down_proj": 11, r"layers\.[02]\.self_attn\.q_proj": 3}},
        8,
    ),
    "both": ("qwen3_moe", parameters(GATE_UP, DOWN) | modules("q_proj", "o_proj"), 4),
    "gate_up only": ("qwen3_moe", parameters(GATE_UP), 4),
    "down only": ("qwen3_moe", parameters(DOWN), 4),
    "patterns": (
        "qwen3_moe",
        parameters(GATE_UP, DOWN)
        | {"rank_pattern": {"experts.gate_up_proj": 3}, "alpha_pattern": {r".*\.down_proj": 11}},
        4,
    ),
    "separate": ("qwen3_moe", modules("q_proj", "gate_proj", "up_proj", "down_proj"), 8),
    # rows of gate and up alternate
    "gpt-oss": ("gpt_oss", parameters(GATE_UP, DOWN) | {"target_modules": "all-linear"}, 4),
    "gpt-oss, two layers": (
        *("gpt_oss", parameters(*(f"{i}.{name}" for i in (0, 2) for name in (GATE_UP, DOWN))), 4),
    ),
    "gpt-oss, gate_up only": ("gpt_oss", parameters(GATE_UP, "mlp.router.weight"), 4),
    # only the MLP has modules named gate_proj
    "MLP and experts": pytest.param(
        "gemma4_moe",
        parameters("experts.gate_up_proj", "experts.down_proj") | modules("q_proj", "gate_proj"),
        4,
        marks=pytest.mark.long,
    ),
    "all-linear": ("qwen3_moe", {"target_modules": "all-linear", "r": 2}, 4),
    # matrices as parameters are saved under ordinary names, and patterns see the parameter's name
    "matrices": (
        "qwen3",
        parameters("mlp.gate_proj.weight", "1.self_attn.o_proj.weight")
        | {"rank_pattern": {"gate_proj.weight": 2, "gate_proj": 3}},
        4,
    ),
}


@pytest.mark.parametrize(("family", "fields", "rank"), IMPORTS.values(), ids=IMPORTS)
def test_what_peft_saves_has_its_logits_here(family, fields, rank, rng, saved, tiny_base, hf_dirs):
    base = tiny_base(family)
    directory, model = saved(family, **({"target_modules": []} | fields))
    adapter, config = read_peft(directory, *tables(base))
    assert config.rank == rank
    tree.check_fits(adapter, config, transformer.abstract(base.cfg), "it")
    tokens_BT = decided_tokens(model, base.cfg, rng)
    bare = oracles.torch_logits(oracles.torch_model(hf_dirs(family)), tokens_BT)
    ours = our_logits(base, adapter, config, tokens_BT)
    assert_same_logits(ours, oracles.torch_logits(model, tokens_BT), bare, looser(base.cfg))


@pytest.mark.parametrize("rslora", [False, True])
def test_unpacked_factors_that_peft_fused_come_back_exactly(
    rslora, rng, tiny_base, hf_dirs, tmp_path
):
    """The block form: PEFT has gate and up in one pair of rank 2r, and writes that; each gets its
    half again.
    """
    base, config = tiny_base("qwen3_moe"), AdapterConfig(3, 5.0, LINEAR_TARGETS, rslora)
    adapter, (names, shapes) = random_adapter(rng, base, config), tables(base)
    write_peft(tmp_path / "ours", adapter, config, names)
    peft_model(hf_dirs("qwen3_moe"), tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    written = load_file(tmp_path / "theirs" / WEIGHTS)
    assert written[f"{LAYER0}.base_layer.lora_A.weight"].shape == (E * 2 * config.rank, D)
    back, read = read_peft(tmp_path / "theirs", names, shapes)
    assert (read.rank, read.alpha, read.rslora) == (config.rank, config.alpha, rslora)
    # alpha times sqrt(2) over sqrt(2r) is alpha over sqrt(r) up to float64's last bits, and
    # float32's in B
    chex.assert_trees_all_close(back, adapter, rtol=2.4e-7 * rslora, atol=0)


@pytest.fixture
def directory(request, rng, saved, tiny_base, tmp_path):
    """A sound directory: both parameters at rank 4, or experts one by one at rank 2."""
    if request.param == "fused":
        return saved("qwen3_moe", target_modules=[], target_parameters=[GATE_UP, DOWN])[0]
    base, config = tiny_base("qwen3_moe"), AdapterConfig(2, targets=("gate", "up", "down"))
    adapter = random_adapter(rng, base, config)
    write_peft(tmp_path / "out", adapter, config, tables(base)[0])
    return tmp_path / "out"


def cut(tensors, name, experts):
    """Keeps the first experts only."""
    a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    tensors[f"{name}.lora_A.weight"] = a.reshape(E, 4, -1)[:experts].reshape(experts * 4, -1)
    tensors[f"{name}.lora_B.weight"] = b.reshape(-1, 4, E)[:, :, :experts].reshape(-1, 4 * experts)


def without(tensors, name):
    for factor in "AB":
        del tensors[f"{name}.lora_{factor}.weight"]


EXPERT3, EXPERT5 = f"{LAYER0}.3.up_proj", f"{LAYER0}.5.up_proj"
TWICE = {f"{EXPERT5}.lora_A.weight": np.ones((4, D), np.float32)}
TWICE |= {f"{EXPERT5}.lora_B.weight": np.ones((F, 4), np.float32)}
NARROW = {f"{EXPERT3}.lora_A.weight": np.ones((2, 47), np.float32)}
ABSENT = [GATE_UP, DOWN, "mlp.gate.weight", "layers.9.mlp.experts.down_proj"]
FUSED_SPOILT = {  # words of the error -> change of the tensors, or fields of the config
    r"down_proj has lora_A \(28, 40\) and .*; 8 experts of rank 4": lambda t: cut(t, LAYER0, 7),
    r"has gate_up_proj's .* but not down_proj's: the file is inc": lambda t: without(t, LAYER0),
    r"names model\.layers\.0\.mlp\.experts\.gate_up_proj, but the file has no": (
        lambda t: without(t, f"{LAYER0}.base_layer")
    ),
    r"up_proj has its own factors and the fused ones of all": lambda t: t.update(TWICE),
    "PEFT before 0.19.1 swapped A and B of experts": {"peft_version": "0.18.1"},
    r"lora_A \(32, 48\) and lora_B \(80, 32\); 8 experts of rank 2, .* need 16 rows": {"r": 2},
    r"of which 'layers\.9\.mlp\.experts\.down_proj' is not adaptable": parameters(*ABSENT),
}
UNPACKED_SPOILT = {
    r"experts\.3\.up_proj is missing, but 7 of the 8 .* present": lambda t: without(t, EXPERT3),
    r"lora_A \(2, 47\) and .*; this base needs \(2, 48\)": lambda t: t.update(NARROW),
}
SPOILT = [("fused", *case) for case in FUSED_SPOILT.items()]
SPOILT += [("unpacked", *case) for case in UNPACKED_SPOILT.items()]


@pytest.mark.parametrize(("directory", "message", "change"), SPOILT, indirect=["directory"])
def test_files_that_do_not_fit_are_refused(directory, message, change, tiny_base):
    if callable(change):
        edit_tensors(directory, change)
    else:
        edit_config(directory, **change)
    with pytest.raises(UserError, match=message):
        read_peft(directory, *tables(tiny_base("qwen3_moe")))
