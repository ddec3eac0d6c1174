"""Parts of decoder layers: projections with adapters, norm, rotary embedding, gated MLP.

Axes: B rows, T tokens, L layers, D model width, F width of the MLP or of a projection, N heads, H
head dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mint_jax.lora.slot_kernel import Ends
from mint_jax.lora.view import AdapterView, add_deltas
from mint_jax.models import quantised, stored
from mint_jax.models.config import ModelConfig, RopeScaling, rope_frequencies
from mint_jax.models.stacked import LayerOf, products
from mint_jax.params import ParamSpec

Activation = Callable[..., jax.Array]  # of gate and up, or of up
_ENDS: dict[Ends, tuple[str, ...]] = {
    ("embed", "q_heads"): ("q", "qkv", "z", "qkvz", "in"),
    ("embed", "kv_heads"): ("k", "v"),
    ("q_heads", "embed"): ("o", "out"),
    ("embed", "latent"): ("q_a", "kv_a", "z_a", "decay_a"),
    ("latent", "q_heads"): ("q_b", "kv_b", "z_b", "decay_b"),
    ("embed", "ffw"): ("gate", "up"),
    ("ffw", "embed"): ("down",),
    ("embed", None): ("router", "beta", "decay", "ba", "latent_in", "shared_gate", "input_gate"),
    (None, "embed"): ("latent_out", "input_out"),
}
# logical axes of every projection's in and out dimensions
AXES: dict[str, Ends] = {name: ends for ends, names in _ENDS.items() for name in names}


def matrix(
    name: str, L: int, d_in: int, d_out: int, dtype: Any, bias: bool = False
) -> dict[str, ParamSpec]:
    """Returns the specs of a projection in ``L`` layers: ``w [L, in, out]``, and ``b [L, out]``."""
    leaf = {"w": ParamSpec((L, d_in, d_out), ("layers", *AXES[name]), dtype)}
    if bias:
        leaf["b"] = ParamSpec((L, d_out), ("layers", AXES[name][1]), dtype, "zeros")
    return leaf


def project(
    x_BTD: jax.Array, params: dict[str, Any], lora: AdapterView | None, name: str
) -> jax.Array:
    """Returns ``x W + bias + delta``, ``[B, T, F]``, in one matmul over all rows of all policies.

    ``params[name]`` is ``{"w": [D, F]}`` or a ``stacked.LayerOf``, with an optional ``"b": [F]``,
    or in the form of ``quantised.py`` or ``stored.py``; ``lora`` has this layer's adapters.
    """
    return project_each(x_BTD, params, lora, (name,))[0]


def project_each(
    x_BTD: jax.Array, params: dict[str, Any], lora: AdapterView | None, names: tuple[str, ...]
) -> list[jax.Array]:
    """Runs ``project`` for projections of the same rows, in one call if read from stacks."""
    whole: dict[str, jax.Array] = {}
    loras = [] if lora is None else [lora.at(name) for name in names]
    if all(isinstance(params[name]["w"], LayerOf) for name in names):
        made = products([params[name]["w"] for name in names])
        if loras and all(params[name].keys() == {"w"} for name in names):
            return add_deltas(x_BTD, made, loras, [AXES[name] for name in names])
        whole = dict(zip(names, made.of(x_BTD)))
    out = []
    for name in names:
        with jax.named_scope(name):
            leaf = params[name]
            if whole:
                y = quantised.scaled(whole[name], leaf)
            elif stored.narrower(leaf["w"], x_BTD):
                y = stored.matmul(x_BTD, leaf["w"])
            else:
                y = quantised.matmul(x_BTD, leaf)
            y = y.astype(x_BTD.dtype)
            if "b" in leaf:
                y = y + leaf["b"].astype(y.dtype)[None, None]
            out.append(y)
    return add_deltas(x_BTD, out, loras, [AXES[name] for name in names]) if loras else out


def norm(L: int, D: int, dtype: Any) -> ParamSpec:
    return ParamSpec((L, D), ("layers", "norm"), dtype, "ones")


# The gradient is written out: the backward pass stores only ``x`` and one scalar per row.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """Returns ``x / rms(x) * (offset + scale)`` over the last axis, in float32, in the dtype of
    ``x``.

    Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    return _norm_forward(x, scale, eps, offset)[0]


def _norm_forward(x, scale, eps, offset):
    x32 = x.astype(jnp.float32)
    inv = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inv * _wide(scale, x, offset)).astype(x.dtype), (x, inv, scale)


def _wide(scale, x, offset):
    wide = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return wide + offset if offset else wide


def _norm_backward(eps, offset, residuals, g):
    # y = x r s with r = (mean(x^2) + eps)^(-1/2):  dx = r (g s - x r^2 mean(g s x))
    del eps
    x, inv, scale = residuals
    x32, g32 = x.astype(jnp.float32), g.astype(jnp.float32)
    gs = g32 * _wide(scale, x, offset)
    dx = inv * (gs - x32 * (inv * inv) * jnp.mean(gs * x32, axis=-1, keepdims=True))
    dscale = jnp.sum(g32 * x32 * inv, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(_norm_forward, _norm_backward)


def rope_tables(positions_BT: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin ``[B, T, rope_dim / 2]`` float32, times the attention factor.

    Rotary embedding (Su et al. 2021, arXiv 2104.09864): dimension i pairs with i + H/2.
    """
    inv, factor = rope_frequencies(cfg.rope_dim, cfg.rope_theta, cfg.rope_scaling)
    angle = positions_BT[..., None].astype(jnp.float32) * np.asarray(inv, np.float32)[None, None]
    tables = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    # Otherwise XLA recomputes them inside every layer's fusion.
    return jax.lax.optimization_barrier(tables)


def query_growth(positions_BT: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Returns the factor on queries, ``1 + beta ln(1 + floor(position / context))``, ``[B, T]``
    float32, which sharpens attention over long contexts (Llama 4, Ministral 3).
    """
    assert scaling.growth is not None
    ago = jnp.floor(positions_BT.astype(jnp.float32) / scaling.original_context)
    return 1 + scaling.growth * jnp.log1p(ago)


def rotate(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """Rotates the first dimensions of each head, twice as many as the tables ``[B, T, H / 2]``
    have; returns the dtype of ``x``.
    """
    cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
    x, half = x_BTNH.astype(jnp.float32), cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def rotate_pairs(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """Rotates pairs (0, 1), (2, 3), ...; first members come first in the result."""
    # Queries and keys are reordered alike, which leaves their products unchanged.
    halves = jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)
    return rotate(halves, cos_BTH, sin_BTH)


def input_specs(L: int, D: int, width: int, dtype: Any) -> dict[str, Any]:
    """Returns the parameters that add embeddings of ``width`` to ``L`` layers' outputs."""
    return {
        "input_gate": matrix("input_gate", L, D, width, dtype),
        "input_out": matrix("input_out", L, width, D, dtype),
        "norm": norm(L, D, dtype),
    }


def mlp_matrices(L: int, F: int, cfg: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Returns the matrices of ``L`` stacked MLPs of width ``F``."""
    D, bias = cfg.d_model, cfg.mlp_bias
    inward = ("gate", "up") if cfg.gated else ("up",)
    out = {name: matrix(name, L, D, F, dtype, bias) for name in inward}
    return out | {"down": matrix("down", L, F, D, dtype, bias)}


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns ``silu(gate) * up``; the backward pass stores only the two arguments."""
    return jax.nn.silu(gate) * up


def _swiglu_backward(residuals, g):
    gate, up = residuals
    sigma = jax.nn.sigmoid(gate)
    return g * up * sigma * (1 + gate * (1 - sigma)), g * gate * sigma


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


@jax.checkpoint
def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns ``(up + 1) * gate * sigmoid(1.702 gate)`` of clamped arguments (gpt-oss)."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


@jax.checkpoint
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns ``gelu(gate) * up`` with the approximation by tanh (arXiv 2002.05202)."""
    return jax.nn.gelu(gate, approximate=True) * up


@jax.checkpoint
def relu2(up: jax.Array) -> jax.Array:
    """Returns ``max(up, 0)^2`` (So et al. 2021, arXiv 2109.08668), for MLPs without a gate."""
    return jnp.square(jax.nn.relu(up))


ACTIVATIONS: dict[str, Activation] = {
    "silu": swiglu,
    "clamped": clamped_swiglu,
    "gelu_tanh": geglu,
    "relu2": relu2,
}


def mlp(
    h_BTD: jax.Array, p: Any, lora: AdapterView | None, activation: Activation = swiglu
) -> jax.Array:
    """Computes ``down(silu(gate h) * up h)`` (Shazeer 2020, arXiv 2002.05202), or
    ``down(activation(up h))`` without a gate.
    """
    names = tuple(name for name in ("gate", "up") if name in p)
    inward = zip(names, project_each(h_BTD, p, lora, names))
    inward = [checkpoint_name(x, f"mlp_{name}") for name, x in inward]
    return project(activation(*inward), p, lora, "down")
