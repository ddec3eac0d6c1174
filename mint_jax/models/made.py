"""Bases of random weights in the shapes of real models, made on the devices: nothing is downloaded or read.

For benches, rehearsals and programs at real sizes. What they say is noise.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.errors import UserError, choice
from mint_jax.models import quantised, transformer
from mint_jax.models.config import ModelConfig
from mint_jax.params import ParamSpec

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


def named(name: str) -> bool:
    """Whether a base's name asks for random weights: ``random:`` and a name of ``SHAPES`` or a directory with a ``config.json``."""
    return name.lower().startswith(PREFIX)


def shape(name: str) -> dict[str, Any]:
    """The fields of ``config.json`` of such a name.

    Raises:
        UserError: neither a name of ``SHAPES`` nor a directory with a ``config.json``.
    """
    model = name[len(PREFIX) :]
    file = Path(model) / "config.json"
    if file.is_file():
        return json.loads(file.read_text())
    if model.lower() not in SHAPES:
        raise choice("base", name, [*(PREFIX + one for one in SHAPES), f"{PREFIX} and a directory with a config.json"])
    return SHAPES[model.lower()]


def fingerprint(fields: dict[str, Any]) -> str:
    """A hex digest that identifies random weights of this shape; of no trained base."""
    return hashlib.sha256(b"random weights of seed 0 " + json.dumps(fields, sort_keys=True).encode()).hexdigest()


def params(
    cfg: ModelConfig, mesh: Mesh, dtype: Any, quantise: str = "", progress: Callable[[int, int], None] | None = None
) -> params_lib.Tree:
    """Random parameters where they are to be, sharded; the same on every mesh, but for the last bit where platforms differ.

    A leaf is one program without temporaries of its size. In 8 bits weights are drawn as such, with the scale that keeps their spread:
    the matrix is never there in full.

    Args:
        quantise: as of ``base.load``.
        progress: called with (bytes done, bytes in all) after each leaf.
    """
    specs = transformer.abstract(cfg, dtype, quantise)
    plain = dict(params_lib.leaves_with_path(transformer.abstract(cfg, dtype)))
    total, done = params_lib.nbytes(specs), 0

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        nonlocal done
        key = jax.random.fold_in(jax.random.key(0), params_lib.path_seed(path))
        make = spec.materialise
        if quantise and (path not in plain or plain[path].dtype != spec.dtype):
            make = functools.partial(_in_8_bits, plain[f"{path.rpartition('/')[0]}/w"], spec, quantise)
        out = jax.jit(make, out_shardings=sharding.sharding_of(spec, mesh))(key)
        out.block_until_ready()
        done += spec.nbytes
        if progress is not None:
            progress(done, total)
        return out

    return params_lib.map_with_path(leaf, specs)


def _in_8_bits(plain: ParamSpec, spec: ParamSpec, kind: str, key: jax.Array) -> jax.Array:
    """A quantised matrix, or its scales: four deviations of a normal distribution are the largest number there is."""
    top, deviations = quantised.KINDS[kind][1], 4
    if spec.dtype == jnp.float32:
        fan_in = plain.fan_in if plain.fan_in is not None else plain.shape[-2]
        return jnp.full(spec.shape, deviations / top * fan_in**-0.5, jnp.float32)
    drawn = jnp.clip(jax.random.normal(key, spec.shape) * (top / deviations), -top, top)
    return (jnp.round(drawn) if jnp.issubdtype(spec.dtype, jnp.integer) else drawn).astype(spec.dtype)


def refuse_peers(name: str) -> None:
    """Of what other programs would have to open.

    Raises:
        UserError: random weights are in no file.
    """
    if named(name):
        raise UserError(f"base {name!r} is made on the devices and in no file that another program could read: use a checkpoint")
