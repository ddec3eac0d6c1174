"""Bases that a hosted service trains, by the fields of their published config.json: each tensor of
a sparse copy is read or skipped as planned, or the refusal says what is missing.

The list is what Tinker's ``get_server_capabilities`` named in the summer of 2026, with DeepSeek-V4.
Names and shapes of tensors are those of the transformers class, in each file's published layout.
"""

import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mint_jax.data.tokenizer import Tokenizer as OurTokenizer
from mint_jax.errors import UserError
from mint_jax.models import hf, names, published
from mint_jax.models.config import rope_frequencies
from mint_jax.models.hf_config import from_hf
from tests.models.hf_config_test import GPT_OSS


def _fields(names, *values):
    return dict(zip(names.split(), values, strict=True))


_SIZES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
_MORE = {"use_sliding_window": False, "sliding_window": None, "rope_scaling": None}
_MORE |= {"max_window_layers": 36, "tie_word_embeddings": False}
_QWEN3 = names.SHAPES["qwen3-4b"] | _MORE | {"model_type": "qwen3"}
_QWEN3_MOE = names.SHAPES["qwen3-30b-a3b"] | _MORE | {"model_type": "qwen3_moe"}
_LONG = {"max_position_embeddings": 262144, "rope_theta": 10000000}
_ROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 10000000}
_ROPE |= {"rope_type": "default", "partial_rotary_factor": 0.25}
_MORE = {"model_type": "qwen3_5_moe_text", "attn_output_gate": True, "mlp_only_layers": []}
_MORE |= {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "rope_parameters": _ROPE}
_MORE |= {"mtp_use_dedicated_embeddings": False}
_35B = names.SHAPES["qwen3.5-35b-a3b"] | _MORE
_397B = names.SHAPES["qwen3.5-397b-a17b"] | _MORE
_QWEN3_5 = {k: v for k, v in _35B.items() if "expert" not in k and "moe" not in k}
_QWEN3_5 |= {"model_type": "qwen3_5_text"}
_QWEN3_6 = {"output_gate_type": "swish", "partial_rotary_factor": 0.25, "pad_token_id": None}
_DEEPSEEK = {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_act": "silu"}
_DEEPSEEK |= _fields(_SIZES, 7168, 61, 128, 128, 18432) | {"moe_intermediate_size": 2048}
_DEEPSEEK |= {"attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3, "n_group": 8}
_DEEPSEEK |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK |= {"qk_rope_head_dim": 64, "moe_layer_freq": 1, "n_routed_experts": 256}
_DEEPSEEK |= {"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8}
_DEEPSEEK |= {"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "topk_group": 4}
_DEEPSEEK |= {"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_DEEPSEEK |= {"tie_word_embeddings": False, "max_position_embeddings": 163840}
_DEEPSEEK |= {"rope_theta": 10000}
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
_DEEPSEEK["rope_scaling"] = _YARN | {"factor": 40}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
_FP8 |= {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
_KIMI = _DEEPSEEK | {"model_type": "kimi_k2", "vocab_size": 163840, "first_k_dense_replace": 1}
_KIMI |= {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384}
_KIMI |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5}
_KIMI |= {"max_position_embeddings": 262144, "rope_theta": 50000, "num_nextn_predict_layers": 0}
_KIMI |= {"rope_scaling": _YARN | {"factor": 64}, "aux_loss_alpha": 0.001, "seq_aux": True}
_INT4 = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32}
_INT4 |= {"num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"}
_KIMI["quantization_config"] = {
    "config_groups": {
        "group_0": {"input_activations": None, "output_activations": None, "weights": _INT4}
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "head_dim": 128, "hidden_act": "silu"}
_LLAMA |= _fields(_SIZES, 3072, 28, 24, 8, 8192) | {"attention_bias": False, "mlp_bias": False}
_LLAMA |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_LLAMA |= {"tie_word_embeddings": True, "pretraining_tp": 1}
_LLAMA["rope_scaling"] = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
_LLAMA["rope_scaling"] |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}


def _qwen3_5(value_heads, *sizes, **others):
    return _QWEN3_5 | _fields(_SIZES, *sizes) | {"linear_num_value_heads": value_heads} | others


_235B = _fields(_SIZES, 4096, 94, 64, 4, 12288) | {"moe_intermediate_size": 1536}
_2507 = _LONG | {"max_window_layers": 94, "rope_theta": 5000000}
_DENSE, _ROUTED = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
_9B = _qwen3_5(32, 4096, 32, 16, 4, 12288, tie_word_embeddings=False)
_FLOAT8, _PACKED = published.Scheme(0, (128, 128)), published.Scheme(4, (1, 32), compressed=True)
# name -> architecture, text model, format of weights, tokenizer class; None: a file of tiktoken
PUBLISHED = {
    "Llama-3.2-3B": ("LlamaForCausalLM", _LLAMA, None, "PreTrainedTokenizerFast"),
    "Qwen3-8B": (
        *("Qwen3ForCausalLM", _QWEN3 | _fields(_SIZES, 4096, 36, 32, 8, 12288)),
        *(None, "Qwen2Tokenizer"),
    ),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", _QWEN3_MOE, None, "Qwen2Tokenizer"),
    "Qwen3-30B-A3B-2507": ("Qwen3MoeForCausalLM", _QWEN3_MOE | _LONG, None, "Qwen2Tokenizer"),
    "Qwen3-235B-A22B-2507": (
        *("Qwen3MoeForCausalLM", _QWEN3_MOE | _235B | _2507, None, "Qwen2Tokenizer"),
    ),
    "Qwen3.5-4B": (
        *(_DENSE, _qwen3_5(32, 2560, 32, 16, 4, 9216, tie_word_embeddings=True)),
        *(None, "Qwen2Tokenizer"),
    ),
    "Qwen3.5-9B": (_DENSE, _9B, None, "Qwen2Tokenizer"),  # and its Base
    "Qwen3.6-27B": (
        *(_DENSE, _qwen3_5(48, 5120, 64, 24, 4, 17408, tie_word_embeddings=False) | _QWEN3_6),
        *(None, "Qwen2Tokenizer"),
    ),
    "Qwen3.5-35B-A3B-Base": (_ROUTED, _35B, None, "Qwen2Tokenizer"),
    "Qwen3.6-35B-A3B": (_ROUTED, _35B | _QWEN3_6, None, "Qwen2Tokenizer"),
    "Qwen3.5-397B-A17B": (_ROUTED, _397B, None, "Qwen2Tokenizer"),
    "gpt-oss-20b": ("GptOssForCausalLM", GPT_OSS, published.MXFP4, "PreTrainedTokenizerFast"),
    "gpt-oss-120b": (
        "GptOssForCausalLM",
        GPT_OSS
        | {"num_hidden_layers": 36, "num_local_experts": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 18},
        *(published.MXFP4, "PreTrainedTokenizerFast"),
    ),
    "DeepSeek-V3.1": (
        *("DeepseekV3ForCausalLM", _DEEPSEEK | {"quantization_config": _FP8}),
        *(_FLOAT8, "LlamaTokenizerFast"),
    ),
    "Kimi-K2.6": ("KimiK25ForConditionalGeneration", _KIMI, _PACKED, None),
}
_GEMMA4 = "Gemma4ForConditionalGeneration"
_26B = names.SHAPES["gemma-4-26b-a4b"] | {"model_type": "gemma4_text"}
# and those whose numbers other tests compare
PLANNED = PUBLISHED | {"gemma-4-26B-A4B": (_GEMMA4, _26B, None, None)}
# Tensors of other parts that the files have, too.
_MTP = ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"]
OTHERS = {
    **{key: [*_MTP, "model.visual.patch_embed.proj.weight"] for key in (_DENSE, _ROUTED)},
    "KimiK25ForConditionalGeneration": ["vision_tower.a.weight", "mm_projector.b.weight"],
    _GEMMA4: ["model.vision_tower.a.weight", "model.embed_vision.b.weight"],
    "DeepseekV3ForCausalLM": [
        f"model.layers.{{after}}.{name}.weight"
        for name in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.head")
    ],
}
_NESTED = _DENSE, _ROUTED, _GEMMA4  # have a prefix of names, and experts as in transformers
KEPT = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")  # in full, in a file of float8


def _config(name, layers=None):
    architecture, text, *_ = PLANNED[name]
    if layers:
        text = text | {"num_hidden_layers": layers}
        if "layer_types" in text:
            text |= {"layer_types": text["layer_types"][:layers]}
    if "Conditional" not in architecture:
        return {"architectures": [architecture]} | text, text
    kind = text["model_type"].removesuffix("_text") if architecture in _NESTED else "kimi_k25"
    outer = {"architectures": [architecture], "model_type": kind, "vision_config": {}}
    return outer | {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}, text


def _torch_config(text):
    fields = {k: v for k, v in text.items() if k != "quantization_config"}
    fields["model_type"] = fields["model_type"].replace("kimi_k2", "deepseek_v3")
    return transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(
        json.loads(json.dumps(fields))
    )


def _tensors(name, text):
    """Yields name, dtype and shape of each tensor as the published files have them."""
    architecture, _, scheme, _ = PLANNED[name]
    with torch.device("meta"):
        state = transformers.AutoModelForCausalLM.from_config(_torch_config(text)).state_dict()
    if text["tie_word_embeddings"]:
        state.pop("lm_head.weight")
    routed = re.compile(r"\.experts\.(gate_up|down)_proj$")
    for key, tensor in state.items():
        shape = list(tensor.shape)
        if scheme == published.MXFP4 and routed.search(key):
            E, columns, rows = shape
            yield f"{key}_blocks", "U8", [E, rows, columns // 32, 16]
            yield f"{key}_scales", "U8", [E, rows, columns // 32]
        elif routed.search(key) and architecture not in _NESTED:
            E, rows, columns = shape
            parts = ("gate", "up") if "gate_up" in key else ("down",)
            for e in range(E):
                for part in parts:
                    one = routed.sub(f".experts.{e}.{part}_proj.weight", key)
                    yield from _matrix(one, [rows // len(parts), columns], scheme)
        elif scheme == _FLOAT8 and len(shape) == 2 and not key.endswith(KEPT):
            yield from _matrix(key, shape, scheme)
        else:
            yield key, "F32" if key.endswith("correction_bias") else "BF16", shape
    for key in OTHERS.get(architecture, ()):
        yield key.format(after=text["num_hidden_layers"]), "BF16", [2, 2]


def _matrix(key, shape, scheme):
    module, (rows, columns) = key.removesuffix(".weight"), shape
    if scheme == _FLOAT8:
        yield key, "F8_E4M3", [rows, columns]
        yield f"{key}_scale_inv", "F32", [math.ceil(rows / 128), math.ceil(columns / 128)]
    elif scheme == _PACKED:
        yield f"{module}.weight_packed", "I32", [rows, columns // 8]
        yield f"{module}.weight_scale", "BF16", [rows, columns // 32]
        yield f"{module}.weight_shape", "I32", [rows, columns]  # its value
    else:
        yield key, "BF16", [rows, columns]


def _in_file(key, architecture):
    """Returns a text tensor's name in the published files."""
    if architecture == "KimiK25ForConditionalGeneration":
        return key if key.startswith(("vision", "mm_")) else f"language_model.{key}"
    if architecture in _NESTED and key not in OTHERS[architecture]:
        return re.sub("^model.", "model.language_model.", key)
    return key


def _write_sparse(directory, config, tensors, architecture):
    """Writes a checkpoint whose values take no disk, one file a layer, with an index."""
    (directory / "config.json").write_text(json.dumps(config))
    files, shapes, index = {}, {}, {}
    for key, dtype, shape in tensors:
        name = _in_file(key, architecture)
        layer = re.search(r"layers\.(\d+)\.", key)
        if key.endswith(".weight_shape"):
            shapes[name] = np.array(shape, np.int32)
        else:
            files.setdefault(layer[1] if layer else "rest", {})[name] = dtype, shape
    for part, entries in files.items():
        header, at = {}, 0
        for name, (dtype, shape) in entries.items():
            size = math.prod(shape) * {"U8": 1, "F8_E4M3": 1, "BF16": 2}.get(dtype, 4)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            index[name], at = f"model-{part}.safetensors", at + size
        text = json.dumps(header).encode()
        with open(directory / f"model-{part}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
    if shapes:
        safetensors.numpy.save_file(shapes, directory / "model-shapes.safetensors")
        index |= dict.fromkeys(shapes, "model-shapes.safetensors")
    (directory / hf.INDEX).write_text(json.dumps({"weight_map": index}))


def _plan(name, layers, directory):
    config, text = _config(name, layers)
    _write_sparse(directory, config, _tensors(name, text), PLANNED[name][0])
    assert published.read_scheme(directory) == PLANNED[name][2]
    hf.reader(directory, hf.read_model(directory), jnp.bfloat16)


@pytest.mark.parametrize("name", PLANNED)
def test_each_tensor_of_the_first_layers_is_planned(name, tmp_path):
    _plan(name, 4, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", PLANNED)
def test_each_tensor_is_planned(name, tmp_path):
    _plan(name, None, tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_has_the_numbers_of_transformers(name):
    config, text = _config(name)
    cfg, theirs = from_hf(config), _torch_config(text)
    assert cfg.num_layers == theirs.num_hidden_layers
    assert cfg.num_heads == theirs.num_attention_heads
    assert cfg.num_kv_heads == theirs.num_key_value_heads
    assert (cfg.norm_eps, cfg.context) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    if cfg.experts is not None:
        assert cfg.experts.per_token == theirs.num_experts_per_tok
        assert cfg.experts.scale == getattr(theirs, "routed_scaling_factor", 1.0)
    near = cfg.windows.near if cfg.windows is not None else None
    near = [not full for full in cfg.delta.full] if cfg.delta is not None else near
    if near is not None:
        assert [kind != "full_attention" for kind in theirs.layer_types] == list(near)
    with torch.device("meta"):
        small = _torch_config(_config(name, 4)[1])
        rotary = type(transformers.AutoModelForCausalLM.from_config(small).model.rotary_emb)
    rotary = rotary(theirs)
    ours, factor = rope_frequencies(cfg.rope_dim, cfg.rope_theta, cfg.rope_scaling)
    # theirs is float32
    np.testing.assert_allclose(ours, rotary.inv_freq.double().numpy(), rtol=1e-5)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("name", [name for name, row in PUBLISHED.items() if row[3]])
def test_the_tokenizer_class_is_known(name, tmp_path):
    """Text splits into the tokens of transformers, whatever class the files name."""
    (tmp_path / "config.json").write_text(json.dumps(_config(name, 4)[0]))
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"<|endoftext|>": 256, "th": 257, "e3": 258, "Ġt": 259, "Ġ'": 260, "ÃŃ": 261}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("e", "3"), ("Ġ", "t")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    bpe.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": PUBLISHED[name][3], "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    text = "the3 12 the  tree's\n\n it's e3e3 í ́x"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert OurTokenizer(tmp_path).encode(text) == theirs.encode(text)


REFUSED = {  # architecture -> fields, words of the refusal
    "DeepseekV4ForCausalLM": (
        {"model_type": "deepseek_v4", "compress_ratios": [0, 0, 4, 128], "hc_mult": 4},
        ("compressed attention", "hyper-connections", "hash"),
    ),
    "InklingForConditionalGeneration": (
        {"model_type": "inkling_mm_model", "text_config": {"model_type": "inkling_text"}},
        ("relative positions", "short convolutions"),
    ),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_refusal_says_what_is_missing(architecture):
    fields, words = REFUSED[architecture]
    with pytest.raises(UserError) as error:
        from_hf({"architectures": [architecture]} | fields)
    assert all(word in str(error.value) for word in (architecture, *words)), error.value
