"""A layer of routed experts, with shared experts that every token visits, and its routing.

Axes: B rows, T tokens, D model width, E experts, X experts of a token.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mint_jax import params as params_lib
from mint_jax.lora.view import AdapterView
from mint_jax.models import experts, layers
from mint_jax.models.config import Experts, ModelConfig
from mint_jax.models.expert_parallel import routed
from mint_jax.params import ParamSpec


def specs(cfg: ModelConfig, L: int, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of ``L`` stacked layers."""
    e, D = cfg.experts, cfg.d_model
    assert e is not None
    out = {
        "norm": layers.norm(L, D, dtype),
        "router": router_specs(L, D, e, dtype),
        "experts": experts.specs(L, e.count, e.latent or D, e.width, dtype, e.bias, cfg.gated),
    }
    if e.latent:
        out["latent_in"] = layers.matrix("latent_in", L, D, e.latent, dtype, cfg.mlp_bias)
        out["latent_out"] = layers.matrix("latent_out", L, e.latent, D, dtype, cfg.mlp_bias)
    if e.shared:
        out["shared"] = layers.mlp_matrices(L, e.shared, cfg, dtype)
    if e.shared_gate:
        out["shared_gate"] = layers.matrix("shared_gate", L, D, 1, dtype)
    if e.with_mlp:
        out |= {name: layers.norm(L, D, dtype) for name in ("mlp_norm", "post_norm", "router_norm")}
        out["expert_scale"] = ParamSpec((L, e.count), ("layers", None), dtype, "ones")
    return out


def router_specs(L: int, D: int, experts: Experts, dtype: Any) -> dict[str, ParamSpec]:
    """Returns the router of ``L`` stacked layers; ``choice_bias`` is float32 as released."""
    leaf = {"w": ParamSpec((L, D, experts.count), ("layers", *layers.AXES["router"]), dtype)}
    if experts.scores == "sigmoid":
        leaf["choice_bias"] = ParamSpec((L, experts.count), ("layers", None), jnp.float32, "zeros")
    if experts.bias:
        leaf["b"] = ParamSpec((L, experts.count), ("layers", None), dtype, "zeros")
    return leaf


class Route(NamedTuple):
    """Experts int32 and weights float32 of tokens, ``[B, T, X]``."""

    ids: jax.Array
    weights: jax.Array
    # float32 `[B, T]`: share of the router's own choice that a replayed record lacks, else 0
    missed: jax.Array


def moe(
    h_BTD: jax.Array,
    p: Any,
    lora: AdapterView | None,
    cfg: ModelConfig,
    replay: jax.Array | None = None,
    x_BTD: jax.Array | None = None,
) -> tuple[jax.Array, Route]:
    """Returns the layer's output ``[B, T, D]`` and the route taken; ``replay`` as in ``route``,
    ``x_BTD`` before the layer's norm, for a router that norms its input itself.
    """
    assert cfg.experts is not None
    if cfg.experts.with_mlp:
        assert x_BTD is not None
        x32 = x_BTD.astype(jnp.float32)
        own = layers.rms_norm(x32, p["router_norm"], cfg.norm_eps) * cfg.d_model**-0.5
        taken = route(own, p, lora, cfg.experts, replay)
        factors = p["expert_scale"].astype(jnp.float32)[taken.ids]
        taken = taken._replace(weights=taken.weights * factors)
    else:
        taken = route(h_BTD, p, lora, cfg.experts, replay)
    act = layers.ACTIVATIONS[cfg.activation]
    x = layers.project(h_BTD, p, lora, "latent_in") if cfg.experts.latent else h_BTD
    with jax.named_scope("experts"):
        adapters = None if lora is None else lora.at("experts")
        mlp_of = functools.partial(experts.expert_mlp, kernels=cfg.kernels, activation=act)
        out = routed(x, taken.ids, taken.weights, p["experts"], adapters, mlp_of)
    if cfg.experts.latent:
        out = layers.project(out.astype(h_BTD.dtype), p, lora, "latent_out")
    if cfg.experts.shared:
        with jax.named_scope("shared"):
            shared = layers.mlp(
                h_BTD, p["shared"], None if lora is None else lora.at("shared"), act
            )
            if cfg.experts.shared_gate:
                gate = layers.project(h_BTD, p, lora, "shared_gate").astype(jnp.float32)
                shared = shared * jax.nn.sigmoid(gate).astype(shared.dtype)
            out = out + shared
    return out.astype(h_BTD.dtype), taken


def route(
    h_BTD: jax.Array,
    p: Any,
    lora: AdapterView | None,
    experts: Experts,
    replay_BTX: jax.Array | None = None,
) -> Route:
    """Chooses each token's experts.

    Args:
        replay_BTX: ids recorded by the sampler, -1 for tokens without. They replace the choice,
            with this router's own scores as weights (R3, arXiv 2510.11370), so gradients flow as if
            it had chosen them.
    """
    with jax.named_scope("router"):
        # In float32 whatever the base's dtype: rounding to 8 bits of mantissa makes ties of
        # different scores, which sampler and trainer may break differently.
        logits = layers.project(h_BTD.astype(jnp.float32), p, lora, "router")
        score = jax.nn.sigmoid if experts.scores == "sigmoid" else jax.nn.softmax
        scores = score(logits)
        ids = choose(jax.lax.stop_gradient(scores), p["router"].get("choice_bias"), experts)
        missed = jnp.zeros(ids.shape[:-1], jnp.float32)
        if replay_BTX is not None:
            recorded = replay_BTX.astype(jnp.int32)
            kept = jnp.any(ids[..., None] == recorded[..., None, :], axis=-1)
            lacking = ~kept & (recorded[..., :1] >= 0)
            missed = jnp.mean(lacking.astype(jnp.float32), axis=-1)
            ids = jnp.where(recorded >= 0, recorded, ids)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if experts.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return Route(ids, weights * experts.scale, missed)


def choose(scores_BTE: jax.Array, bias_E: jax.Array | None, experts: Experts) -> jax.Array:
    """Returns the ids of the best ``per_token`` experts, int32 ``[B, T, X]``."""
    # DeepSeek-V3, section 2.1.2: a bias enters the choice but not the weight, and experts come from
    # the best groups, ranked by the sum of their two best experts.
    if bias_E is not None:
        scores_BTE = scores_BTE + bias_E[None, None]
    if experts.groups > 1:
        grouped = scores_BTE.reshape(*scores_BTE.shape[:-1], experts.groups, -1)
        quality = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        best = jax.lax.top_k(quality, experts.groups_chosen)[1]
        chosen = jnp.any(best[..., None] == jnp.arange(experts.groups)[None, None, None], axis=-2)
        scores_BTE = jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(scores_BTE.shape)
    return jax.lax.top_k(scores_BTE, experts.per_token)[1].astype(jnp.int32)


def perturb(params: Any, std: float, key: jax.Array) -> Any:
    """Returns the base with normal noise of relative ``std`` on its routers, to study replay."""

    def noisy(path: str, w: jax.Array) -> jax.Array:
        if not path.endswith("moe/router/w"):
            return w
        own = jax.random.fold_in(key, params_lib.path_seed(path) & 0x7FFFFFFF)
        return w + (std * jnp.std(w) * jax.random.normal(own, w.shape)).astype(w.dtype)

    return params_lib.map_with_path(noisy, params)
