"""Bases of random weights in the shapes of real models, made on the devices for benchmarks and
rehearsals.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.models import hf, quantised, transformer
from mint_jax.models.config import ModelConfig
from mint_jax.params import ParamSpec


def fingerprint(fields: dict[str, Any]) -> str:
    """Returns a hex digest that identifies random weights of this shape, and no trained base."""
    return hashlib.sha256(
        b"random weights of seed 0 " + json.dumps(fields, sort_keys=True).encode()
    ).hexdigest()


def params(
    cfg: ModelConfig,
    mesh: Mesh,
    dtype: Any,
    quantise: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> params_lib.Tree:
    """Returns random parameters, sharded; the same on every mesh but for the last bit between
    platforms.
    """
    specs = transformer.abstract(cfg, dtype, quantise)
    plain = dict(params_lib.leaves_with_path(transformer.abstract(cfg, dtype)))

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), params_lib.path_seed(path))
        # 8-bit weights are drawn as integers, so the full matrix never exists.
        make = spec.materialise
        if quantise and (path not in plain or plain[path].dtype != spec.dtype):
            make = functools.partial(
                _in_8_bits, plain[f"{path.rpartition('/')[0]}/w"], spec, quantise
            )
        return jax.jit(make, out_shardings=sharding.sharding_of(spec, mesh))(key)

    return hf.one_by_one(leaf, specs, progress)


def _in_8_bits(plain: ParamSpec, spec: ParamSpec, kind: str, key: jax.Array) -> jax.Array:
    """Returns a quantised matrix or its scales; the largest number is four standard deviations."""
    top, deviations = quantised.KINDS[kind][1], 4
    if spec.dtype == jnp.float32:
        fan_in = plain.fan_in if plain.fan_in is not None else plain.shape[-2]
        return jnp.full(spec.shape, deviations / top * fan_in**-0.5, jnp.float32)
    drawn = jnp.clip(jax.random.normal(key, spec.shape) * (top / deviations), -top, top)
    return (jnp.round(drawn) if jnp.issubdtype(spec.dtype, jnp.integer) else drawn).astype(
        spec.dtype
    )
