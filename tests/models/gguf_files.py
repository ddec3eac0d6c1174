"""Tiny random GGUF files of the ``llama`` architecture."""

import string

import gguf
import numpy as np
from gguf.quants import quantize

LAYERS, D, H = 2, 64, 16


def _interleave(w, heads):
    """llama.cpp's order of the rows of q and k (``permute`` in its convert_hf_to_gguf.py)."""
    return (
        w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
    )


def write(
    path,
    rng,
    tied=False,
    kind=gguf.GGMLQuantizationType.F16,
    architecture="llama",
    tokenizer="gpt2",
    pre="smollm",
    extra=(),
    table=None,
    F=96,
    heads=(4, 2),
    V=40,
    fields=lambda writer: None,
):
    """Writes the file; returns the weights put in, under their Hugging Face names.

    Args:
        kind: of matrices, and of embeddings unless ``table`` says otherwise.
        extra: names of tensors that no llama has.
        F, heads, V: width of the MLP, query and kv heads, vocabulary.
        fields: adds further ones.
    """
    N, K = heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(K)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5e4)
    fields(writer)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    tokens = ["<|end|>", *string.ascii_lowercase, *string.digits, "Ġ", "ab", "abc"]
    tokens += [f"more{i}" for i in range(V - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    assert len(tokens) == V
    weights = {}

    def put(name, hf_name, *shape):
        value = rng.normal(size=shape).astype(np.float32)
        stored = (
            _interleave(value, N if name.endswith("q") else K)
            if name.endswith(("attn_q", "attn_k"))
            else value
        )
        own = table if table is not None and name in ("token_embd", "output") else kind
        if value.ndim == 1:
            writer.add_tensor(f"{name}.weight", stored)
        else:
            writer.add_tensor(f"{name}.weight", quantize(stored, own), raw_dtype=own)
            # by rows: the order of rows does not matter
            value = gguf.quants.dequantize(quantize(value, own), own)
        weights[f"{hf_name}.weight"] = np.asarray(value, np.float32)

    put("token_embd", "model.embed_tokens", V, D)
    put("output_norm", "model.norm", D)
    if not tied:
        put("output", "lm_head", V, D)
    for i in range(LAYERS):
        at, to = f"blk.{i}.", f"model.layers.{i}."
        put(at + "attn_norm", to + "input_layernorm", D)
        put(at + "ffn_norm", to + "post_attention_layernorm", D)
        for name, rows, cols in (("q", N * H, D), ("k", K * H, D), ("v", K * H, D)):
            put(f"{at}attn_{name}", f"{to}self_attn.{name}_proj", rows, cols)
        put(f"{at}attn_output", f"{to}self_attn.o_proj", D, N * H)
        for name, rows, cols in (("gate", F, D), ("up", F, D), ("down", D, F)):
            put(f"{at}ffn_{name}", f"{to}mlp.{name}_proj", rows, cols)
    for name in extra:
        writer.add_tensor(name, np.ones(H // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
