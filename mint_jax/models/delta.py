"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464): a mixer of ``state.py`` whose values are
corrected by its state. Kimi Delta Attention (arXiv 2510.26692, section 3) has a decay for each
channel of keys, and sigmoid gates, both through latents.

Axes: B rows, T tokens, D model width, N heads, K key dim, V value dim, W channels of the short
convolution: queries, keys and values of all heads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mint_jax import sharding
from mint_jax.lora.view import AdapterView
from mint_jax.models import paged, state
from mint_jax.models.config import Delta, ModelConfig
from mint_jax.models.layers import matrix, norm, project, project_each, rms_norm
from mint_jax.params import ParamSpec

KEY_EPS = 1e-6  # of the norm of queries and keys


def specs(cfg: ModelConfig, L: int, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of ``L`` stacked layers."""
    d, D = cfg.delta, cfg.d_model
    assert d is not None
    if d.latent:
        return _channel_specs(d, L, D, dtype)
    values = d.heads * d.value
    inward = {"qkv": d.channels, "z": values, "beta": d.heads, "decay": d.heads}
    if d.joint:
        inward = {"qkvz": d.channels + values, "ba": 2 * d.heads}
    return {
        "norm": norm(L, D, dtype),
        **{name: matrix(name, L, D, F, dtype) for name, F in inward.items()},
        "convolution": state.taps_spec(d, L, dtype),
        "log_rate": norm(L, d.heads, dtype),
        "bias": norm(L, d.heads, dtype),
        "out_norm": norm(L, d.value, dtype),
        "out": matrix("out", L, values, D, dtype),
    }


def _channel_specs(d: Delta, L: int, D: int, dtype: Any) -> dict[str, Any]:
    keys, values = d.heads * d.key, d.heads * d.value
    ends = {"q": (D, keys), "k": (D, keys), "v": (D, values), "beta": (D, d.heads)}
    ends |= {"decay_a": (D, d.latent), "decay_b": (d.latent, keys), "o": (values, D)}
    ends |= {"z_a": (D, d.latent), "z_b": (d.latent, values)}
    return {
        "norm": norm(L, D, dtype),
        **{name: matrix(name, L, *of, dtype) for name, of in ends.items()},
        "convolution": state.taps_spec(d, L, dtype),
        "log_rate": ParamSpec((L, 1, d.heads, 1, 1), ("layers", *(None,) * 4), dtype, "ones"),
        "bias": norm(L, keys, dtype),
        "out_norm": norm(L, d.value, dtype),
    }


def mixer(
    h_BTD: jax.Array,
    p: dict[str, Any],
    lora: AdapterView | None,
    of: state.Lineage | None,
    cache: paged.Cache | None,
    cfg: ModelConfig,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Mixes the tokens of packed rows, or of rows with a cache; ``[B, T, D]``, and the pool."""
    d, (B, T, _) = cfg.delta, h_BTD.shape
    assert d is not None
    if d.latent:
        names = "q", "k", "v", "beta", "decay_a", "z_a"
        *qkv, beta, decay, z = project_each(h_BTD, p, lora, names)
        x = jnp.concatenate(qkv, axis=-1)
        decay, z = (project(y, p, lora, name) for y, name in ((decay, "decay_b"), (z, "z_b")))
    elif d.joint:
        qkvz, ba = project_each(h_BTD, p, lora, ("qkvz", "ba"))
        x, z, beta, decay = _apart(qkvz, ba, d)
    else:
        x, z, beta, decay = project_each(h_BTD, p, lora, ("qkv", "z", "beta", "decay"))
    rate, bias = (p[name].astype(jnp.float32)[None, None] for name in ("log_rate", "bias"))
    decay = jax.nn.softplus(decay.astype(jnp.float32) + bias)
    if d.latent:
        rate, decay = rate.reshape(1, 1, -1, 1), decay.reshape(B, T, d.heads, d.key)
    decay *= -jnp.exp(rate)
    beta, heads = jax.nn.sigmoid(beta.astype(jnp.float32)), functools.partial(_heads, d=d)
    taps = p["convolution"][:, 0]
    o, _, pool = state.mix(x, taps, heads, decay, beta, of, cache, cfg, corrects=True)
    # A cache may split rows where gates are split by heads; XLA would gather the matrices.
    o = sharding.constrain(o, "batch", "tokens", "q_heads", None)
    o: Any = rms_norm(o, p["out_norm"], cfg.norm_eps)
    gate, last = (jax.nn.sigmoid, "o") if d.latent else (jax.nn.silu, "out")
    o = o * gate(z.astype(jnp.float32)).reshape(o.shape)
    return project(o.reshape(B, T, -1).astype(h_BTD.dtype), p, lora, last), pool


def _apart(qkvz: jax.Array, ba: jax.Array, d: Delta) -> list[jax.Array]:
    """Returns channels, gates, betas and decays from projections that hold them by key head."""
    (B, T, _), each = qkvz.shape, d.heads // d.key_heads

    def split(y: jax.Array, *ends: int) -> list[jax.Array]:
        parts = jnp.split(y.reshape(B, T, d.key_heads, -1), ends, axis=-1)
        return [part.reshape(B, T, -1) for part in parts]

    keys = 2 * d.key
    *qkv, z = split(qkvz, d.key, keys, keys + each * d.value)
    return [jnp.concatenate(qkv, axis=-1), z, *split(ba, each)]


def _heads(x: jax.Array, d: Delta) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values of every head from the convolution's output."""
    B, T, _ = x.shape
    keys = d.key_heads * d.key
    q, k, v = jnp.split(jax.nn.silu(x), [keys, 2 * keys], axis=-1)

    def unit(y: jax.Array) -> jax.Array:
        y = y.reshape(B, T, d.key_heads, d.key)
        y = y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + KEY_EPS)
        return jnp.repeat(y, d.heads // d.key_heads, axis=2)

    return unit(q) * d.key**-0.5, unit(k), v.reshape(B, T, d.heads, d.value)
