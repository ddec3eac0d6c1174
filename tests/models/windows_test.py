"""Families with windows: published configs and files of several media, refusals, the gradient of
sinks, and the runs that a window reads.

Axes: B rows, T tokens, N heads, H head dim, D table entries.
"""

import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.models import attention, hf, names, paged, transformer
from mint_jax.models.attention import Segments
from mint_jax.models.config import Kernels
from mint_jax.models.hf_config import from_hf
from pallas_kernels import dispatch
from tests.marks import first

TYPES = ("sliding_attention", "full_attention")
GPT_OSS = names.SHAPES["gpt-oss-20b"] | {
    "model_type": "gpt_oss",
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "layer_types": TYPES * 12,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 3}
GEMMA4 |= {"layer_types": [TYPES[0], TYPES[1], TYPES[1]], "attention_k_eq_v": True}
GEMMA4_MOE = GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "moe_intermediate_size": 8}
MINISTRAL = {"architectures": ["Ministral3ForCausalLM"]}


@pytest.mark.parametrize(
    ("fields", "billions"),
    [
        *((GPT_OSS, 20.91), (names.SHAPES["gpt-oss-120b"], 116.83)),
        # of the classes of transformers 5.23
        (names.SHAPES["qwen3-next-80b-a3b"], 79.67),
        (names.SHAPES["glm-4.5"], 352.80),
        # of their model cards
        (names.SHAPES["gemma-4-31b"], 30.7),
        (names.SHAPES["gemma-4-26b-a4b"], 25.2),
        (names.SHAPES["nemotron-3-nano-30b-a3b"], 31.6),
    ],
    ids=[
        *("gpt-oss-20b", "gpt-oss-120b", "qwen3-next", "glm-4.5", "gemma-4-31b", "gemma-4-26b"),
        "nemotron-3-nano",
    ],
)
def test_published_bases_have_their_number_of_parameters(fields, billions):
    cfg = from_hf(fields)
    sizes = [math.prod(s.shape) for _, s in params_lib.leaves_with_path(transformer.abstract(cfg))]
    assert sum(sizes) / 1e9 == pytest.approx(billions, rel=0.002)


def test_gemma_is_read_in_its_older_spelling_too():
    """As in the file of gemma-3-4b-it: a pattern, two bases, and scaling of the layers without a
    window.
    """
    old = {"sliding_window_pattern": 3, "rope_theta": 2e6, "rope_local_base_freq": 3e4}
    old |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "num_hidden_layers": 7}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}
    near = {"rope_type": "default", "rope_theta": 3e4}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": near}}
    new |= {"num_hidden_layers": 7, "layer_types": [TYPES[i in (2, 5)] for i in range(7)]}
    assert from_hf(GEMMA | old) == from_hf(GEMMA | new)
    assert from_hf(GEMMA | new).windows.theta == 3e4


def test_heads_of_gemma_4_are_read_in_both_spellings():
    """As in published files, and as transformers 5.23 saves them."""
    published = {"global_head_dim": 64, "num_global_key_value_heads": 2}
    saved = {"per_layer_config": {i: {"head_dim": 64, "num_key_value_heads": 2} for i in "12"}}
    cfg = from_hf(GEMMA4 | published)
    assert cfg == from_hf(GEMMA4 | saved)
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.windows.heads) == (2, 64, (4, 256))
    # the number counts only with attention_k_eq_v
    assert from_hf(GEMMA4 | published | {"attention_k_eq_v": False}).num_kv_heads == 4
    # the last layer has no window, whatever the file says
    assert from_hf(GEMMA4 | {"layer_types": [TYPES[0]] * 3}).windows.near == (True, True, False)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
REFUSED = [
    (GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
    (GPT_OSS | {"sliding_window": None}, "sliding_window is None"),
    (GPT_OSS | {"sliding_window": 0}, "sliding_window is 0"),
    (GPT_OSS | {"layer_types": TYPES}, "for each of 24 layers"),
    (GPT_OSS | {"layer_types": ["chunked_attention"] * 24}, "expected 'full_attention' or"),
    (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (GEMMA | {"hidden_activation": "silu"}, "only 'gelu_pytorch_tanh'"),
    (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    (GEMMA | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
    (
        GEMMA | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "layers with a window have rope scaling",
    ),
    (GEMMA4 | {"enable_moe_block": True, "num_experts": 8}, "top_k_experts is None"),
    (GEMMA4_MOE | {"top_k_experts": 9}, "top_k_experts is 9, of 8 experts"),
    (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    (GEMMA4 | {"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3"),
    (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
    (GEMMA4 | {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9"),
    (GEMMA4 | {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
    (GEMMA4 | {"per_layer_config": {"1": {"head_dim": 8}}}, "expected equal heads in all"),
    (GEMMA4 | {"per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config of layer 1"),
    (GEMMA4 | {"num_global_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
    (GEMMA4 | {"rope_theta": 1e5}, "rope_theta is 100000.0"),
    (
        GEMMA4
        | {"rope_parameters": {"full_attention": {"factor": 2.0, "partial_rotary_factor": 0.5}}},
        "partial_rotary_factor is 0.5; only rope_type 'proportional'",
    ),
    (MINISTRAL | {"rope_parameters": YARN}, "has no llama_4_scaling_beta"),
    (MINISTRAL | {"rope_parameters": {"rope_type": "default"}}, "has no llama_4_scaling_beta"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_model_here_computes_is_refused(fields, words):
    with pytest.raises(UserError) as caught:
        from_hf(fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name", "prefix"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration", "language_model.model."),
        ("ministral3", "Mistral3ForConditionalGeneration", "model.language_model."),
        ("gemma4_shared", "Gemma4ForConditionalGeneration", "model.language_model."),
    ],
)
def test_a_checkpoint_of_pictures_too_is_read_for_its_text(
    family, name, prefix, hf_dirs, tmp_path, mesh
):
    source = hf_dirs(family)
    directory = shutil.copytree(source, tmp_path / "base")
    text = json.loads((source / "config.json").read_text())
    del text["architectures"]
    outer = {"architectures": [name], "model_type": "other", "text_config": text}
    (directory / "config.json").write_text(json.dumps(outer | {"vision_config": {}}))
    tensors = {
        one.replace("model.", prefix, 1) if one.startswith("model.") else one: x
        for one, x in load_file(source / "model.safetensors").items()
    }
    tensors |= {f"{part}.w": torch.ones(2) for part in ("vision_tower", "multi_modal_projector")}
    if family == "gemma4_shared":  # published files have keys of layers that share another's
        others = "model.embed_vision.w", f"{prefix}layers.5.self_attn.k_proj.weight"
        tensors |= {one: torch.ones(2) for one in others}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    cfg = hf.read_model(directory)
    assert cfg.replace(directory=None) == hf.read_model(source).replace(directory=None)
    whole, plain = (hf.load(folder, cfg, mesh) for folder in (directory, source))
    jax.tree.map(np.testing.assert_array_equal, whole, plain)


@pytest.mark.parametrize("kernel", first(1, ["xla", "pallas_tpu", "pallas_gpu"]))
def test_gradients_of_sinks_are_those_of_a_softmax_with_one_more_key(rng, kernel):
    B, T, N, H, window = 2, 70, 4, 8, 9
    q, k, v, g = (rng.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(4))
    sinks, zeros = rng.normal(size=N).astype(np.float32), np.zeros((B, T), np.int32)
    position = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))

    def ours(*args):
        q, k, v, sinks = args
        segments = Segments(zeros, zeros)
        near = {"window": window, "positions_BT": position}
        out = attention.packed_attention(
            q, k, v, segments, 0.4, kernel=kernel, sinks_N=sinks, **near
        )
        return jnp.sum(out * g)

    def plain(*args):
        q, k, v, sinks = args
        s = 0.4 * jnp.einsum("btnh,bsnh->bnts", q, k)
        ago = np.arange(T)[:, None] - np.arange(T)[None]
        s = jnp.where(((ago >= 0) & (ago < window))[None, None], s, -jnp.inf)
        extra = jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))
        w = jax.nn.softmax(jnp.concatenate([s, extra], axis=-1), axis=-1)[..., :-1]
        return jnp.sum(jnp.einsum("bnts,bsnh->btnh", w, v) * g)

    args = q, k, v, sinks
    of_all = tuple(range(4))
    for got, want in zip(*(jax.jit(jax.grad(f, of_all))(*args) for f in (ours, plain))):
        # float32 sums of up to 140 terms
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max() + 1e-6)


@pytest.mark.parametrize("family", first(1, ["gemma3", "gpt_oss", "mistral"]))
def test_layers_with_a_window_have_a_kernel_too(family, tiny_base, rng):
    """A prompt and two rollouts; the second is far from the prompt in the row."""
    base, lengths = tiny_base(family), (30, 60, 20)
    own = np.repeat(np.arange(3, dtype=np.int32), lengths)[None]
    starts = (0, lengths[0], lengths[0])
    position = np.concatenate([at + np.arange(n) for at, n in zip(starts, lengths)])[None]
    tokens = rng.integers(3, base.cfg.vocab_size, own.shape).astype(np.int32)
    inputs = transformer.DecoderInputs(
        tokens, position.astype(np.int32), Segments(own, np.zeros_like(own))
    )

    def hidden(params, kernel):
        cfg = base.cfg.replace(kernels=Kernels(packed_attention=kernel))
        return transformer.hidden_states(params, None, inputs, cfg)[0]

    before = dispatch.fallen.copy()
    jax.eval_shape(functools.partial(hidden, kernel="auto"), base.params)
    skipped = dispatch.passed_over(before, "cuda")
    assert "packed_attention" not in [one["op"] for one in skipped], skipped
    # a named kernel that cannot serve a layer raises
    xla, kernel = (jax.jit(hidden, static_argnums=1)(base.params, n) for n in ("xla", "pallas_gpu"))
    # float32 sums in another order, after layers and a norm
    np.testing.assert_allclose(kernel, xla, rtol=0, atol=2e-5 * np.abs(xla).max())


def test_a_window_reads_its_own_runs_only():
    """At 5,000 cached positions: the runs of 128 that hold the window, and no more."""
    B, D = 3, 64 * paged.RUN_PAGES
    prefix, own = np.int32([5000, 4990, 3]), np.int32([0, 10, 4997])
    table, none = np.zeros((B, D), np.int32), np.zeros(B, np.int32)
    view = paged.View(table, prefix, own, none, none)
    for window, most in ((128, 3), (1000, 10)):
        near, edge = paged.within(view, window, prefix + own, 1)
        runs = paged.last_run(prefix, own) - near.first
        read = np.asarray(runs) + edge.run.shape[1]
        assert (read <= most).all(), (window, read)
        assert np.asarray(edge.visible).any()
