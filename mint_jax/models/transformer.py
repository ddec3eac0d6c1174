"""The decoder as pure functions over a parameter tree: ``abstract(cfg)``, ``hidden_states``, ``logits``.

Leaves LoRA to ``linear.project``, attention to ``attention.py`` and ``mla.py``, sampling and losses to others. All policies' rows run
through the base together; nothing here knows how many policies there are.

Axes: B rows, T tokens, L layers, V vocab, D model width, F ffw width, N query heads, K kv heads, H head dim.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from mint_jax.lora.apply import BoundAdapters, batch_delta, embedding_delta
from mint_jax.models import dsa, mla, mlp, moe, quantised
from mint_jax.models.attention import Context, Past, Segments, cached_attention, packed_attention
from mint_jax.models.config import ModelConfig
from mint_jax.models.linear import matrix, project
from mint_jax.models.norm import rms_norm
from mint_jax.models.rope import rope_tables, rotate
from mint_jax.params import ParamSpec
from mint_jax.sharding import constrain

# What the backward pass keeps of each layer. SmolLM2-135M, 4 rows of 256 tokens, float32, two cores, forward and backward: "none"
# 804 MiB of temporaries and 2.40 s, "names" 736 MiB and 2.36 s, "full" 140 MiB and 2.68 s, for it runs every layer twice. On
# accelerators "names" is what keeps large products from being computed twice while norms and activations are.
REMAT = {
    "none": None,
    "names": jax.checkpoint_policies.save_only_these_names(
        *("residual", "latent", "chosen", "query", "key", "value", "attended", "logsumexp"),
        *("mlp_gate", "mlp_up", "expert_gate", "expert_up", "expert_inner"),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def abstract(cfg: ModelConfig, dtype: Any = jnp.float32, quantise: str = "") -> Any:
    """The ``ParamSpec`` tree of a base: ``{"embed", <layer kind>: {"attn", "mlp" or "moe"}, ..., "final_norm", "unembed"}``.

    ``quantise``: a key of ``quantised.KINDS`` for 8-bit matrices in the layers.
    """
    D = cfg.d_model
    specs: dict[str, Any] = {"embed": {"w": ParamSpec((cfg.vocab_size, D), ("vocab", "embed"), dtype, fan_in=D)}}
    for kind, L in cfg.stacks.items():
        attn = attention_specs(cfg, L, dtype) if cfg.latent is None else mla.specs(cfg, L, dtype) | dsa.specs(cfg, kind, dtype)
        sparse = kind == "moe"
        ffw = {"moe": moe.specs(cfg, L, dtype)} if sparse else {"mlp": mlp.specs(L, D, cfg.d_ff, dtype, cfg.mlp_bias)}
        specs[kind] = {"attn": attn} | ffw
    specs["final_norm"] = ParamSpec((D,), ("norm",), dtype, "ones")
    if not cfg.tie_embeddings:
        specs["unembed"] = {"w": ParamSpec((cfg.vocab_size, D), ("vocab", "embed"), dtype, fan_in=D)}
    return quantised.specs(specs, quantise) if quantise else specs


def attention_specs(cfg: ModelConfig, L: int, dtype: Any) -> dict[str, Any]:
    """The parameters of grouped-query attention in ``L`` stacked layers."""
    D, H, qkv = cfg.d_model, cfg.head_dim, cfg.qkv_bias
    attn: dict[str, Any] = {
        "norm": ParamSpec((L, D), ("layers", "norm"), dtype, "ones"),
        "q": matrix(L, D, cfg.num_heads * H, ("embed", "q_heads"), dtype, qkv),
        "k": matrix(L, D, cfg.num_kv_heads * H, ("embed", "kv_heads"), dtype, qkv),
        "v": matrix(L, D, cfg.num_kv_heads * H, ("embed", "kv_heads"), dtype, qkv),
        "o": matrix(L, cfg.num_heads * H, D, ("q_heads", "embed"), dtype, cfg.o_bias),
    }
    if cfg.qk_norm:
        attn |= {name: ParamSpec((L, H), ("layers", "norm"), dtype, "ones") for name in ("q_norm", "k_norm")}
    return attn


def unembed_table(params: Any) -> jax.Array:
    """``[V, D]``: the output matrix, which is the embedding when they are tied."""
    return (params["unembed"] if "unembed" in params else params["embed"])["w"]


@struct.dataclass
class Inputs:
    """What the decoder reads.

    Attributes:
        tokens_BT, positions_BT: int32.
        segments: how rows are packed; by default each row is one segment. Without a cache only.
        cache: ``{"dense": {name: (part, ...)}}``, names and each part's axes as in what ``keep_kv`` returns; the current tokens
            follow it.
        lengths: valid positions of each cache part.
        replay: recorded experts of every MoE layer, ``[L, B, T, X]``, see ``router.route``.
    """

    tokens_BT: jax.Array
    positions_BT: jax.Array
    segments: Segments | None = None
    cache: Any = None
    lengths: tuple[jax.Array, ...] | None = None
    replay: jax.Array | None = None


def hidden_states(
    params: Any,
    lora: BoundAdapters | None,
    inputs: Inputs,
    cfg: ModelConfig,
    *,
    keep_kv: bool = False,
    keep_routes: bool = False,
    remat: str = "none",
) -> tuple[jax.Array, Any]:
    """Runs the decoder up to and including the final norm.

    Args:
        lora: adapters bound to the rows; None for the bare base.
        keep_kv: also return what a cache keeps of the current tokens.
        keep_routes: also return the experts that were used.
        remat: a key of ``REMAT``.

    Returns:
        ``[B, T, D]``, and per layer kind what was asked for: ``{"dense": {"k": [L, B, K, T, H], "v": ...}}``, under latent
        attention ``{"latent": [L, B, T, C], "rope": [L, B, T, J]}``, with ``index`` where keys are chosen; and for MoE
        layers ``"routes"``, int32 ``[L, B, T, X]``, and ``"missed"``, see ``router.Route``.
    """
    tokens_BT, positions_BT, segments, cache, replay = inputs.tokens_BT, inputs.positions_BT, inputs.segments, inputs.cache, inputs.replay
    chex.assert_rank([tokens_BT, positions_BT], 2)
    chex.assert_equal_shape([tokens_BT, positions_BT, *(segments or ())])
    chex.assert_rank([] if replay is None else [replay], 4)
    if segments is None and cache is None:
        zeros = jnp.zeros_like(tokens_BT)
        segments = Segments(zeros, zeros)
    ctx = Context(*rope_tables(positions_BT, cfg), segments, inputs.lengths)
    with jax.named_scope("embed"):
        x = embed(params, lora, tokens_BT)
    B, T = tokens_BT.shape
    chosen = dsa.undecided(B, T, () if cache is None else next(iter(cache.values())).get("index", ()), cfg)
    kept = {}
    for kind in cfg.stacks:
        scanned, indexers = dsa.detach(params[kind])

        def layer(carry, layer_inputs, indexers=indexers):
            x, chosen = carry
            p, a, past, turn, routes = layer_inputs
            indexer = None if turn is None else dsa.Layer(indexers, turn)
            carry, kv, route = _layer(x, chosen, p, a, past, indexer, routes, ctx, cfg)
            return carry, (kv if keep_kv else {}) | ({"routes": route.ids, "missed": route.missed} if keep_routes and route else {})

        if REMAT[remat] is not None:
            # Inside a scan XLA cannot merge the second computation with the first, so the barriers against that are left out.
            layer = jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False)
        past = None if cache is None else cache[kind]
        xs = scanned, _below(lora, kind), past, dsa.turns(cfg, kind), replay if kind == "moe" else None
        (x, chosen), kept[kind] = jax.lax.scan(layer, (x, chosen), xs)
    with jax.named_scope("final_norm"):
        x = rms_norm(x, params["final_norm"], cfg.norm_eps)
    return x, kept


def _layer(x, chosen, p, lora, past, indexer, replay, ctx: Context, cfg: ModelConfig):
    x = constrain(checkpoint_name(x, "residual"), "batch", "tokens", "act_embed")
    with jax.named_scope("attn"):
        inputs = rms_norm(x, p["attn"]["norm"], cfg.norm_eps), p["attn"], _below(lora, "attn"), past, ctx, cfg
        if cfg.latent is None:
            out, kv = _attention(*inputs)
        else:
            out, kv, chosen = mla.latent_attention(*inputs, indexer, chosen)
        x = constrain(checkpoint_name(x + out, "residual"), "batch", "tokens", "act_embed")
    if "moe" in p:
        with jax.named_scope("moe"):
            out, route = moe.moe(rms_norm(x, p["moe"]["norm"], cfg.norm_eps), p["moe"], _below(lora, "moe"), cfg, replay)
            return (x + out, chosen), kv, route
    with jax.named_scope("mlp"):
        out = mlp.mlp(rms_norm(x, p["mlp"]["norm"], cfg.norm_eps), p["mlp"], _below(lora, "mlp"))
        return (x + out, chosen), kv, None


def _below(lora: BoundAdapters | None, name: str) -> BoundAdapters | None:
    return None if lora is None else lora.at(name)


def _attention(h_BTD, p, lora, past, ctx: Context, cfg: ModelConfig):
    B, T, _ = h_BTD.shape
    q = project(h_BTD, p, lora, "q").reshape(B, T, cfg.num_heads, cfg.head_dim)
    k = project(h_BTD, p, lora, "k").reshape(B, T, cfg.num_kv_heads, cfg.head_dim)
    v = project(h_BTD, p, lora, "v").reshape(B, T, cfg.num_kv_heads, cfg.head_dim)
    if cfg.qk_norm:
        q, k = rms_norm(q, p["q_norm"], cfg.norm_eps), rms_norm(k, p["k_norm"], cfg.norm_eps)
    q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)
    # Heads before positions: a decode step reads one head's keys of all positions, which then lie in one piece of memory.
    kept = {"k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
    scale = cfg.head_dim**-0.5
    if past is None:
        assert ctx.segments is not None
        out = packed_attention(q, k, v, ctx.segments, scale)
    else:
        assert ctx.lengths is not None
        out = cached_attention(q, kept["k"], kept["v"], Past(past["k"], past["v"], ctx.lengths), scale)
    return project(out.reshape(B, T, -1), p, lora, "o"), kept


def embed(params: Any, lora: BoundAdapters | None, tokens_BT: jax.Array) -> jax.Array:
    """Token embeddings ``[B, T, D]``, with the deltas of adapters that target ``embed``."""
    table = params["embed"]["w"]
    x = table[tokens_BT]
    delta = None if lora is None else embedding_delta(tokens_BT, lora.at("embed"), table.shape[1], x.dtype)
    return x if delta is None else x + delta


def logits(params: Any, lora: BoundAdapters | None, h_BTD: jax.Array) -> jax.Array:
    """``[B, T, V]`` float32, with the deltas of adapters that target ``unembed``."""
    chex.assert_shape(h_BTD, (None, None, unembed_table(params).shape[1]))
    with jax.named_scope("unembed"):
        out = jnp.einsum("BTD,VD->BTV", h_BTD, unembed_table(params), preferred_element_type=jnp.float32)
        delta = None if lora is None else batch_delta(h_BTD, lora.at("unembed"), out.shape[-1])
        return out if delta is None else out + delta.astype(jnp.float32)
