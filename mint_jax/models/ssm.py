"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 7): a mixer of ``state.py`` that decays its
state by a scalar for each head.

With a head's time step ``d_t = max(softplus(dt_t + bias), step_min)``, rate ``A = -exp(log_rate)``,
and ``B_t``, ``C_t`` of its group of heads:

    S_t = exp(d_t A) S_{t-1} + B_t d_t x_t^T,  y_t = C_t S_t + skip x_t

so C are queries, B keys, x values, and d their beta. The output is ``y silu(z)`` with an RMS norm
for each group.

Axes: B rows, T tokens, D model width, N heads, K state size, V head dim, W channels of the short
convolution: x, B and C.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mint_jax import sharding
from mint_jax.lora.view import AdapterView
from mint_jax.models import paged, state
from mint_jax.models.config import ModelConfig, Ssm
from mint_jax.models.layers import matrix, norm, project, rms_norm
from mint_jax.params import ParamSpec


def specs(cfg: ModelConfig, L: int, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of ``L`` stacked layers."""
    d, D = cfg.ssm, cfg.d_model
    assert d is not None
    values, bias = d.heads * d.value, d.projection_bias
    out = {
        "norm": norm(L, D, dtype),
        "in": matrix("in", L, D, values + d.channels + d.heads, dtype, bias),
        "convolution": state.taps_spec(d, L, dtype),
        **{name: norm(L, d.heads, dtype) for name in ("log_rate", "bias", "skip")},
        "out_norm": norm(L, values, dtype),
        "out": matrix("out", L, values, D, dtype, bias),
    }
    if d.bias:
        out["convolution_bias"] = ParamSpec((L, d.channels), ("layers", "norm"), dtype, "zeros")
    return out


def mixer(
    h_BTD: jax.Array,
    p: dict[str, Any],
    lora: AdapterView | None,
    of: state.Lineage | None,
    cache: paged.Cache | None,
    cfg: ModelConfig,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Mixes the tokens of packed rows, or of rows with a cache; ``[B, T, D]``, and the pool."""
    d, (B, T, _) = cfg.ssm, h_BTD.shape
    assert d is not None
    values = d.heads * d.value
    z, x, dt = jnp.split(project(h_BTD, p, lora, "in"), [values, values + d.channels], axis=-1)
    rate, bias, skip = (p[n].astype(jnp.float32)[None, None] for n in ("log_rate", "bias", "skip"))
    step = jnp.maximum(jax.nn.softplus(dt.astype(jnp.float32) + bias), d.step_min)
    heads = functools.partial(_heads, bias_W=p.get("convolution_bias"), d=d)
    decay, taps = -jnp.exp(rate) * step, p["convolution"][:, 0]
    y, x, pool = state.mix(x, taps, heads, decay, step, of, cache, cfg, corrects=False)
    y = sharding.constrain(y + skip[..., None] * x, "batch", "tokens", "q_heads", None)  # see delta
    y = y.reshape(B, T, -1) * jax.nn.silu(z.astype(jnp.float32))
    y = y.reshape(B, T, d.key_heads, -1)
    y: Any = rms_norm(y, jnp.ones(y.shape[-1:], jnp.float32), cfg.norm_eps)
    y = y.reshape(B, T, -1) * p["out_norm"].astype(jnp.float32)[None, None]
    return project(y.astype(h_BTD.dtype), p, lora, "out"), pool


def _heads(
    x_BTW: jax.Array, bias_W: jax.Array | None, d: Ssm
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns C, B and x of every head from the convolution's output."""
    (B, T, _), values = x_BTW.shape, d.heads * d.value
    if bias_W is not None:
        x_BTW = x_BTW + bias_W.astype(jnp.float32)[None, None]
    x, b, c = jnp.split(jax.nn.silu(x_BTW), [values, values + d.key_heads * d.key], axis=-1)

    def of_heads(y: jax.Array) -> jax.Array:
        y = y.reshape(B, T, d.key_heads, d.key)
        return jnp.repeat(y, d.heads // d.key_heads, axis=2)

    return of_heads(c), of_heads(b), x.reshape(B, T, d.heads, d.value)
