"""Conversion of GGUF files to Hugging Face checkpoint directories: dequantised weights, and the
original blocks of 4 and 8 bits.

Covers the ``llama`` architecture with a byte-level BPE tokenizer (such as SmolLM2).
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mint_jax.errors import UserError
from mint_jax.files import new_directory
from mint_jax.models import hf, stored
from pallas_kernels.layer_matmul.blocks import KINDS

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Fields of llama.* that are read or checked. Others may change the forward pass (scaled rope,
# experts, windows).
_READ = {"block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"}
_READ |= {"rope.freq_base", "rope.dimension_count", "attention.head_count"}
_READ |= {"attention.head_count_kv", "attention.key_length", "attention.value_length"}
_READ |= {"attention.layer_norm_rms_epsilon"}
_SPECIAL_TOKEN = 3  # gguf token_type of control tokens


def convert(file: str | Path, directory: str | Path) -> Path:
    """Writes a GGUF file as a checkpoint directory, atomically; ``UserError`` if unsupported."""
    import gguf
    from gguf.quants import dequantize

    directory = Path(directory)
    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{file} is not a readable GGUF file ({error})") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields.get("tokenizer.ggml.model") != "gpt2":
        raise UserError(
            f"{file} has architecture {fields['general.architecture']!r} and tokenizer"
            f" {fields.get('tokenizer.ggml.model')!r}; only 'llama' with a byte-level BPE ('gpt2')"
            " is covered: use the safetensors checkpoint instead"
        )
    _check_fields(fields)
    names = {tensor.name: _hf_name(tensor.name) for tensor in reader.tensors}
    tokenizer = _tokenizer(fields)
    with new_directory(directory, stored.FILE) as staging:
        tokenizer.save(str(staging / "tokenizer.json"))
        (staging / "tokenizer_config.json").write_text(
            json.dumps(_tokenizer_config(fields), indent=1)
        )
        tensors, blocks = {}, {}
        for tensor in reader.tensors:
            rows = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
            tensors[names[tensor.name]] = _rows_in_order(rows, tensor.name, fields)
            if (kind := tensor.tensor_type.name) in KINDS:
                rows = _rows_in_order(np.asarray(tensor.data), tensor.name, fields)
                blocks[names[tensor.name]] = kind, rows
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        config = _config(fields, tied="output.weight" not in names)
        (staging / "config.json").write_text(json.dumps(config, indent=1))
        stored.save(blocks, hf.fingerprint(staging), staging)
    return directory


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", width // heads),
        "hidden_act": "silu",
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "attention_bias": False,
        "mlp_bias": False,
    }


def _rows_in_order(rows: np.ndarray, name: str, fields: dict[str, Any]) -> np.ndarray:
    """Returns a tensor's rows in transformers' order: each head of q and k as two halves."""
    # llama.cpp permutes rows of q and k to pairs (0, H/2, 1, ...) for its interleaved rotation.
    heads = fields["llama.attention.head_count"]
    if ".attn_k." in name:
        heads = fields.get("llama.attention.head_count_kv", heads)
    if ".attn_q." in name or ".attn_k." in name:
        pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
        rows = pairs.swapaxes(1, 2).reshape(rows.shape)
    return np.ascontiguousarray(rows)


def _hf_name(name: str) -> str:
    """Returns a tensor's name in transformers; raises ``UserError`` for one that no llama has."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if found is None or found[2] not in _NAMES:
        raise UserError(
            f"GGUF tensor {name!r} is not covered: use the safetensors checkpoint instead"
        )
    layer, own = found.groups()
    return f"{'' if layer is None else f'model.layers.{layer}.'}{_NAMES[own]}.weight"


def _check_fields(fields: dict[str, Any]) -> None:
    dims = fields["llama.embedding_length"] // fields["llama.attention.head_count"]
    width = fields.get("llama.attention.key_length", dims)
    only = {
        "llama.rope.dimension_count": width,  # all dimensions of a head rotate
        "llama.attention.value_length": width,
        "llama.vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }
    for name, value in fields.items():
        unread = name.startswith("llama.") and name.removeprefix("llama.") not in _READ
        if unread or value != only.get(name, value):
            raise UserError(
                f"GGUF field {name!r} is {value!r}, which is not covered: use the safetensors"
                " checkpoint instead"
            )


def _tokenizer(fields: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields.get("tokenizer.ggml.pre") != "smollm":
        raise UserError(
            f"GGUF pre-tokenizer {fields.get('tokenizer.ggml.pre')!r} is not covered; expected"
            " 'smollm'"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [
        AddedToken(t, special=True, normalized=False)
        for t, kind in zip(tokens, kinds)
        if kind == _SPECIAL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    named = {
        f"{role}_token": fields.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    config: dict[str, Any] = {name: tokens[i] for name, i in named.items() if i is not None}
    config["chat_template"] = fields.get("tokenizer.chat_template")
    config["model_max_length"] = fields["llama.context_length"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return config
