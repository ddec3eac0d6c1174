"""What the tests compare with: tiny random transformers checkpoints, and their logits under
torch.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

# its threads spin while they wait: on a busy machine one is faster than two
torch.set_num_threads(1)
_COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / heads: the two must not be confused
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LATENT = {  # every width its own number; dense layers only
    "head_dim": 8,  # transformers means the rotary part of a head
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
_INDEXER = {"index_n_heads": 12, "index_head_dim": 14, "index_topk": 8}
_EXPERTS = {  # one dense layer, then experts in groups, and a shared one
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_STATES = {
    "num_hidden_layers": 5,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,
    # A query nearly orthogonal to all keys gives a small output, whose rounding the norm would
    # enlarge 300 times: neither library is then within 1e-4 of float64.
    "rms_norm_eps": 1e-2,
}
_SHARED = {  # routed experts beside a gated one of another width
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 28,
}
_NEMOTRON = {
    "num_hidden_layers": None,  # as many as types
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
}


_KIMI_LINEAR = {name: value for name, value in (_LATENT | _EXPERTS).items() if "dense" not in name}
_KIMI_LINEAR |= {"q_lora_rank": None, "rms_norm_eps": 1e-2, "num_hidden_layers": 5}
_KIMI_LINEAR |= {"linear_head_dim": 12, "linear_num_heads": 4}  # rms_norm_eps: as of _STATES
_KIMI_LINEAR |= {"num_local_experts": _KIMI_LINEAR.pop("n_routed_experts"), "head_dim": None}


def _pattern(kinds: str) -> list[str]:
    return [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]


_GEMMA4 = {  # heads of both kinds of layers have their own number and width
    "num_hidden_layers": 4,
    "layer_types": _pattern("sfsf"),
    "sliding_window": 19,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
_WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "tie_word_embeddings": False}
_MSCALE = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
# name -> (transformers config class, what differs from _COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_bias": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "llama_llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": _YARN, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "tie_word_embeddings": False,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            # not half of the model's width: 2F == D would hide a transposition
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "deepseek_v3_dense": ("DeepseekV3Config", _LATENT),
    "deepseek_v3_yarn_dense": ("DeepseekV3Config", _LATENT | {"rope_parameters": _MSCALE}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT | _EXPERTS | {"rope_parameters": _MSCALE}),
    "moonlight": (
        "DeepseekV3Config",
        _LATENT
        | _EXPERTS
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v32_dense": ("DeepseekV32Config", _LATENT | _INDEXER),
    "glm_dense": (
        "GlmMoeDsaConfig",
        _LATENT | _INDEXER | {"indexer_types": ["full", "shared", "full"]},
    ),
    "deepseek_v32": ("DeepseekV32Config", _LATENT | _EXPERTS | _INDEXER),
    "glm": (
        "GlmMoeDsaConfig",
        _LATENT | _EXPERTS | _INDEXER | {"indexer_types": ["full", "shared", "full"]},
    ),
    "glm4": (
        "Glm4MoeConfig",
        {name: value for name, value in _EXPERTS.items() if "group" not in name}
        | {"attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": False},
    ),
    "glm4_lite": (
        "Glm4MoeLiteConfig",
        {name: value for name, value in (_LATENT | _EXPERTS).items() if "dense" not in name}
        | {"n_group": 1, "topk_group": 1},
    ),
    # Widths that the kernels of TPUs serve.
    "qwen3_moe_wide": (
        "Qwen3MoeConfig",
        _WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "qwen3_wide": (
        "Qwen3Config",
        _WIDE | {"intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8},
    ),
    "deepseek_v3_wide": (
        "DeepseekV3Config",
        _LATENT | _EXPERTS | _WIDE | {"n_routed_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _STATES),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _STATES | _SHARED),
    "qwen3_next": (
        "Qwen3NextConfig",
        _STATES | _SHARED | {"linear_num_value_heads": 6, "num_hidden_layers": 4},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _NEMOTRON
        | {name: value for name, value in _EXPERTS.items() if "dense" not in name}
        | {
            "layers_block_type": [*("linear_attention", "moe") * 2, "full_attention", "moe"],
            "moe_shared_expert_intermediate_size": 28,
            "moe_latent_size": 20,
        },
    ),
    "nemotron_h_dense": (
        "NemotronHConfig",
        _NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
        },
    ),
    "kimi_linear": ("KimiLinearConfig", _KIMI_LINEAR),
    "kimi_linear_dense": ("KimiLinearConfig", _KIMI_LINEAR | {"mlp_layer_types": ["dense"] * 5}),
    "gpt_oss": (
        "GptOssConfig",
        {
            # multiples of 32, as MXFP4 needs
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 37,
            "tie_word_embeddings": False,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": [
                f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")
            ],
            "query_pre_attn_scalar": 11,
            "sliding_window": 19,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": ("Gemma4TextConfig", _GEMMA4),
    # embeddings of layers, and three layers that read the keys of earlier ones
    "gemma4_shared": (
        "Gemma4TextConfig",
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": _pattern("sffsff"),
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 101,
            "final_logit_softcapping": None,
        },
    ),
    # an MLP and experts in each layer, with a window and without
    "gemma4_moe": (
        "Gemma4TextConfig",
        _GEMMA4
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3}
        | {"moe_intermediate_size": 40},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "rope_parameters": _MSCALE | {"llama_4_scaling_beta": 0.1},
            "tie_word_embeddings": False,
        },
    ),
    # windows shorter and longer than a page of the cache, a run of pages and a block of queries
    "mistral": ("MistralConfig", {"sliding_window": 45, "tie_word_embeddings": False}),
    "moonlight_dense": ("DeepseekV3Config", _LATENT | {"q_lora_rank": None}),
}


def save_tiny(name: str, directory: Path, max_shard_size: str = "5GB") -> Path:
    """Writes a random model of ``TINY``; every parameter is random, biases and norms too, so that
    none is hidden by a 0 or 1.
    """
    cls, changes = TINY[name]
    config = getattr(transformers, cls)(**(_COMMON | changes))
    torch.manual_seed(int(os.environ["MINT_TEST_SEED"]))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key or key.endswith("per_expert_scale"):
                p.uniform_(0.5, 1.5)
            elif key.endswith("router.scale"):  # scores of size 1, so that experts are not equal
                p.uniform_(3, 9)
            elif p.ndim == 1:
                p.normal_(0, 0.3)
            else:
                p.normal_(0, p.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
            elif key.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def torch_model(directory: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers, eager attention, no dropout."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


def torch_logits(model: Any, tokens_BT: np.ndarray) -> np.ndarray:
    """``[B, T, V]`` for rows without padding."""
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens_BT), dtype=torch.long)).logits.float().numpy()


@contextlib.contextmanager
def watched_topk() -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Gives the list of what torch's ``topk`` was asked for within: the scores and k, in order."""
    seen: list[tuple[torch.Tensor, int]] = []

    def watch(topk):
        def record(scores, k, *args, **kwargs):
            seen.append((scores.detach().clone(), k))
            return topk(scores, k, *args, **kwargs)

        return record

    with (
        mock.patch.object(torch.Tensor, "topk", watch(torch.Tensor.topk)),
        mock.patch.object(torch, "topk", watch(torch.topk)),
    ):
        yield seen


def decided(model: Any, tokens: Sequence[int], margin: float = 1e-5) -> int:
    """How many leading tokens depend on no choice of keys or experts whose last chosen is within
    ``margin`` of the next.

    There float32 may decide either way, and what it decides is seen by all tokens behind. Errors of
    scores are of size 1e-6.
    """
    with watched_topk() as seen:
        torch_logits(model, np.array([tokens]))
    first = len(tokens)
    for scores, k in seen:
        if scores.shape[-1] > k:
            best = (
                scores.reshape(len(tokens), -1, scores.shape[-1]).sort(-1, descending=True).values
            )
            last = best[..., k - 1]
            # below: masked, no choice
            near = ((last - best[..., k] < margin) & (last > -1e30)).any(-1)
            first = min([first, *near.nonzero()[:1, 0].tolist()])
    return first
