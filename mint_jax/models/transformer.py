"""The decoder as pure functions over a parameter tree: ``abstract(cfg)``, ``hidden_states``,
``logits``.

Rows of all policies run through the base together; the model does not know the number of policies.

Axes: B rows, T tokens, L layers, V vocab, D model width, F ffw width, N query heads, K kv heads, H
head dim.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from mint_jax import sharding
from mint_jax.lora.view import AdapterView, batch_delta, embedding_delta
from mint_jax.models import (
    delta,
    dsa,
    layers,
    mla,
    moe,
    paged,
    quantised,
    ssm,
    stacked,
    state,
    stored,
)
from mint_jax.models.attention import Context, Segments, keys_within, packed_attention
from mint_jax.models.config import ModelConfig
from mint_jax.models.layers import matrix, norm, project, project_each, rms_norm, rotate
from mint_jax.params import ParamSpec
from mint_jax.sharding import constrain
from pallas_kernels import dispatch
from pallas_kernels.layer_matmul import blocks, layer_matmul
from pallas_kernels.products import product_f32

# Up to this many rows in use, a CPU kernel computes the logits. Speed relative to XLA's matmul for
# SmolLM2-135M, whose table XLA reads at 23 GB/s for 8 rows: 0.9 to 1.0 at 1 row, 1.3 to 1.7 at 8,
# 1.1 to 1.3 at 16, 0.8 to 1.0 at 24 and 32, 0.6 at 128 (four runs on two cores).
FEW_ROWS = 32

# Values of each layer that the backward pass keeps. SmolLM2-135M, 4 rows of 256 tokens, float32,
# two cores, forward and backward: "none" 804 MiB of temporaries and 2.40 s, "names" 736 MiB and
# 2.36 s, "full" 140 MiB and 2.68 s, since it runs every layer twice. On accelerators "names" avoids
# recomputing large matmuls but recomputes norms and activations.
REMAT = {
    "none": None,
    "names": jax.checkpoint_policies.save_only_these_names(
        *("residual", "latent", "chosen", "query", "key", "value", "attended", "logsumexp"),
        *("mlp_gate", "mlp_up", "expert_gate", "expert_up"),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def abstract(cfg: ModelConfig, dtype: Any = jnp.float32, quantise: str = "") -> Any:
    """Returns the ``ParamSpec`` tree of a base: ``{"embed", <layer kind>: {"attn", "mlp" or "moe"},
    ..., "final_norm", "unembed"}``. ``quantise``: a key of ``quantised.KINDS`` for 8-bit
    matrices in the layers.
    """
    D = cfg.d_model
    table = {"w": ParamSpec((cfg.vocab_size, D), ("vocab", "embed"), dtype, fan_in=D)}
    specs: dict[str, Any] = {"embed": table}
    for stack, L in cfg.stacks.items():
        specs[stack] = {part: _specs(part, stack, L, cfg, dtype) for part in cfg.parts_of(stack)}
    specs["final_norm"] = ParamSpec((D,), ("norm",), dtype, "ones")
    if not cfg.tie_embeddings:
        specs["unembed"] = table
    return quantised.specs(specs, quantise) if quantise else specs


def _specs(part: str, stack: str, L: int, cfg: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Returns one part of ``L`` stacked layers, see ``config.PARTS``."""
    if part == "attn" and cfg.latent is not None:
        return mla.specs(cfg, L, dtype) | dsa.specs(cfg, stack, dtype)
    if part == "mlp":
        D, names = cfg.d_model, ("norm", "post_norm") if cfg.post_norms else ("norm",)
        norms = {name: norm(L, D, dtype) for name in names}
        return norms | layers.mlp_matrices(L, cfg.d_ff, cfg, dtype)
    of = {"attn": attention_specs, "delta": delta.specs, "ssm": ssm.specs, "moe": moe.specs}
    return of[part](cfg, L, dtype)


def attention_specs(cfg: ModelConfig, L: int, dtype: Any) -> dict[str, Any]:
    D, H, qkv = cfg.d_model, cfg.head_dim, cfg.qkv_bias
    attn: dict[str, Any] = {
        "norm": norm(L, D, dtype),
        # A head's gate comes after its query.
        "q": matrix("q", L, D, cfg.num_heads * H * (1 + cfg.gated_attention), dtype, qkv),
        "k": matrix("k", L, D, cfg.num_kv_heads * H, dtype, qkv),
        "v": matrix("v", L, D, cfg.num_kv_heads * H, dtype, qkv),
        "o": matrix("o", L, cfg.num_heads * H, D, dtype, cfg.o_bias),
    }
    if cfg.post_norms:
        attn["post_norm"] = norm(L, D, dtype)
    if cfg.sinks:
        attn["sinks"] = ParamSpec((L, cfg.num_heads), ("layers", "q_heads"), dtype, "zeros")
    if cfg.qk_norm:
        attn |= {"q_norm": norm(L, H, dtype), "k_norm": norm(L, H, dtype)}
    return attn


def stored_unembed(params: Any) -> jax.Array:
    """Returns the output matrix as stored, see ``stored.py``: the embedding if they are tied."""
    return (params["unembed"] if "unembed" in params else params["embed"])["w"]


def cache_heads(cfg: ModelConfig) -> int | None:
    """Returns the heads of a cache's keys and values; None for latents, which all heads share."""
    return cfg.num_kv_heads if cfg.latent is None else None


def cache_specs(
    cfg: ModelConfig,
    pages: int,
    dtype: Any = jnp.float32,
    routes: bool = False,
    states: int = 0,
    near: int | None = None,
) -> Any:
    """Returns the shapes of a cache: ``{"dense": {"k": [L, U, K, PAGE, H], "v": ...}, "moe":
    ...}``.

    With latent attention ``latent [L, U, PAGE, C]`` and ``rope [L, U, PAGE, J]``, and ``index``
    with an indexer; ``{"routes": {"moe": [L, U, PAGE, X]}}`` of stacks with experts if wanted, for
    replay in training (R3). Stacks with a state have ``states`` slots instead of pages, see
    ``state.cache_specs``; those with a window have ``near`` pages, None for ``pages``.
    """

    def entry(width: int, *heads: int, dtype: Any = dtype) -> Any:
        return lambda L, U=pages: jax.ShapeDtypeStruct((L, U, *heads, paged.PAGE, width), dtype)

    if cfg.latent is None:
        of_heads = entry(cfg.head_dim, cfg.num_kv_heads)
        names = {"k": of_heads, "v": of_heads}
    else:
        names = {"latent": entry(cfg.latent.kv_latent), "rope": entry(cfg.latent.rope)}
        names |= {} if cfg.indexer is None else {"index": entry(cfg.indexer.width)}
    out = {}
    for stack, L in cfg.stacks.items():
        if cfg.has_state(stack):
            assert cfg.state is not None
            out[stack] = state.cache_specs(cfg.state, L, states, dtype)
        else:
            own = names if "attn" in cfg.parts_of(stack) else {}
            here = near if near is not None and cfg.has_window(stack) else pages
            out[stack] = {name: make(L, here) for name, make in own.items()}
    if routes and cfg.routed and cfg.experts is not None:
        # The smallest dtype that holds an expert's number.
        kind = jnp.uint8 if cfg.experts.count <= 256 else jnp.uint16
        of_layers = entry(cfg.experts.per_token, dtype=kind)
        out["routes"] = {stack: of_layers(cfg.stacks[stack]) for stack in cfg.routed_layers}
    return out


@struct.dataclass
class DecoderInputs:
    """Inputs of the decoder."""

    tokens_BT: jax.Array  # this and positions_BT: int32
    positions_BT: jax.Array
    # of packed rows, without a cache; None makes each row one segment
    segments: Segments | None = None
    # the cache, `{"dense": {name: [L, U, ..., PAGE, X]}}`, see `cache_specs`; the current tokens
    # come after its contents
    pool: Any = None
    view: paged.View | None = None  # each row's pages in it
    # recorded experts of every MoE layer, `[L, B, T, X]`, see `moe.route`
    replay: jax.Array | None = None


def hidden_states(
    params: Any,
    lora: AdapterView | None,
    inputs: DecoderInputs,
    cfg: ModelConfig,
    *,
    keep_routes: bool = False,
    remat: str = "none",
) -> tuple[jax.Array, Any]:
    """Runs the decoder up to and including the final norm.

    Args:
        lora: adapters bound to the rows; None for the bare base.
        keep_routes: without a cache, also return the experts used. A cache stores them itself.

    Returns:
        ``[B, T, D]``; and by layer kind the pool with the current tokens or, with ``keep_routes``,
        ``"routes"``, int32 ``[L, B, T, X]``, and ``"missed"`` of MoE layers.
    """
    tokens_BT, positions_BT, segments = inputs.tokens_BT, inputs.positions_BT, inputs.segments
    view, replay = inputs.view, inputs.replay
    chex.assert_rank([tokens_BT, positions_BT], 2)
    chex.assert_equal_shape([tokens_BT, positions_BT, *(segments or ())])
    chex.assert_rank([] if replay is None else [replay], 4)
    if segments is None and view is None:
        zeros = jnp.zeros_like(tokens_BT)
        segments = Segments(zeros, zeros)
    lineage = None if cfg.state is None or segments is None else state.lineage(segments)
    ctx = Context(*layers.rope_tables(positions_BT, cfg), segments, lineage)
    if cfg.rope_scaling is not None and cfg.rope_scaling.growth is not None:
        ctx = ctx._replace(growth=layers.query_growth(positions_BT, cfg.rope_scaling))
    near = ctx
    if (windows := cfg.windows) is not None:
        keys = None if segments is None else keys_within(windows.size, positions_BT)
        near = ctx._replace(window=windows.size, keys=keys)
        if windows.theta is not None:
            cos, sin = layers.rope_tables(positions_BT, cfg, windows.theta)
            near = near._replace(cos=cos, sin=sin)
    with jax.named_scope("embed"):
        x = embed(params, lora, tokens_BT)
        if cfg.embed_scale != 1:
            x = x * jnp.asarray(cfg.embed_scale, x.dtype)
    B, T = tokens_BT.shape
    chosen, kept = dsa.undecided(B, T, view, cfg), {}
    for group in cfg.groups:
        own = {stack: near if cfg.has_window(stack) else ctx for stack in group}
        bound = [_bind(s, params, lora, inputs, own[s], cfg, keep_routes) for s in group]
        runs, xs = zip(*bound)
        if REMAT[remat] is not None:
            # Inside a scan XLA cannot merge the recomputation with the original, so the barriers
            # against that are not needed.
            policy = REMAT[remat]
            runs = tuple(jax.checkpoint(run, policy=policy, prevent_cse=False) for run in runs)

        def scanned(carry, layer_inputs, runs=runs):
            x, chosen, pools, count = carry
            pools, kept = list(pools), []
            for i, run in enumerate(runs):
                x, chosen, pools[i], routes = run(x, chosen, pools[i], count, layer_inputs[i])
                kept.append(routes)
            return (x, chosen, tuple(pools), None if count is None else count + 1), tuple(kept)

        # The pool is carried, not scanned over: as scan input and output it is copied in every step
        # (387 MB of temporaries instead of 17), and so would be the stacks of adapters.
        pools = tuple(None if view is None else _pool_of(inputs.pool, stack) for stack in group)
        counted = jnp.int32(0) if _counts(view) else None
        length = len(next(iter(group.values())))
        carry, routes = jax.lax.scan(scanned, (x, chosen, pools, counted), xs, length)
        x, chosen, pools, _ = carry
        kept |= dict(zip(group, routes if view is None else pools))
    if view is not None and "routes" in inputs.pool:
        kept["routes"] = {stack: kept[stack].pop("routes") for stack in inputs.pool["routes"]}
    with jax.named_scope("final_norm"):
        x = _norm(x, params["final_norm"], cfg)
    return x, kept


def _pool_of(pool: Any, stack: str) -> Any:
    """Returns one stack's part of a pool, with its routes."""
    recorded = pool.get("routes", {})
    return pool[stack] | ({"routes": recorded[stack]} if stack in recorded else {})


def _norm(x: jax.Array, scale: jax.Array, cfg: ModelConfig) -> jax.Array:
    return rms_norm(x, scale, cfg.norm_eps, cfg.norm_offset)


def _counts(view: paged.View | None) -> bool:
    """Returns True if layers count themselves: a GPU copies each slice of an array of numbers, and
    of vectors, by a launch of its own.
    """
    return view is not None and dispatch.platform_of_mesh() == "cuda"


def _bind(stack, params, lora, inputs: DecoderInputs, ctx: Context, cfg: ModelConfig, keep_routes):
    """Returns a function of one layer of a stack, and its inputs to scan over."""
    view, replay = inputs.view, inputs.replay if stack in cfg.routed_layers else None
    scanned, whole = stacked.detach(params[stack], view is not None and sharding.one_device())
    adapters, apart = _below(lora, stack), None
    if _counts(view):
        scanned, apart = stacked.side_by_side(scanned)

    def run(x, chosen, pool, count, layer_inputs):
        p, a, number, position, routes = layer_inputs
        p, number = (p, number) if apart is None else (apart(p), count)
        used = None if view is None else view.used
        p = stacked.attach(p, whole, number, cfg.kernels.layer_matmul, used)
        a = None if adapters is None else adapters.in_layer(number, a)
        own = whole.get("attn", {}).get("indexer")
        indexer = None if position is None else dsa.Layer(own, *position)
        cache = None if view is None else paged.Cache(pool, number, view)
        x, chosen, pool, route = _layer(x, chosen, p, a, cache, indexer, routes, ctx, cfg)
        kept = {"routes": route.ids, "missed": route.missed} if keep_routes and route else {}
        return x, chosen, pool, kept

    numbers = cfg.layers_of(stack)
    xs = (
        scanned,
        None if adapters is None else adapters.taps,
        jnp.arange(len(numbers)) if apart is None else None,
        dsa.positions(cfg, stack),
        None if replay is None else replay[cfg.routed_layers[stack]],
    )
    return run, xs


def _layer(x, chosen, p, lora, cache, indexer, replay, ctx, cfg):
    x = constrain(checkpoint_name(x, "residual"), "batch", "tokens", "act_embed")
    pool = None if cache is None else cache.pool
    if part := next((part for part in ("attn", "delta", "ssm") if part in p), ""):
        with jax.named_scope(part):
            h, own = _norm(x, p[part]["norm"], cfg), _below(lora, part)
            if part != "attn":
                mixer = delta.mixer if part == "delta" else ssm.mixer
                out, pool = mixer(h, p[part], own, ctx.lineage, cache, cfg)
            elif cfg.latent is None:
                out, pool = _attention(h, p[part], own, cache, ctx, cfg)
            else:
                arguments = h, p[part], own, cache, ctx, cfg
                out, pool, chosen = mla.latent_attention(*arguments, indexer, chosen)
        if "post_norm" in p[part]:
            out = _norm(out, p[part]["post_norm"], cfg)
        x = constrain(checkpoint_name(x + out, "residual"), "batch", "tokens", "act_embed")
    if "moe" in p:
        with jax.named_scope("moe"):
            h = _norm(x, p["moe"]["norm"], cfg)
            out, route = moe.moe(h, p["moe"], _below(lora, "moe"), cfg, replay)
            if cache is not None and pool is not None and "routes" in pool:
                recorded = paged.record(pool["routes"], route.ids, cache, cache_heads(cfg))
                pool = pool | {"routes": recorded}
            return x + out, chosen, pool, route
    if "mlp" not in p:
        return x, chosen, pool, None
    with jax.named_scope("mlp"):
        h = _norm(x, p["mlp"]["norm"], cfg)
        out = layers.mlp(h, p["mlp"], _below(lora, "mlp"), layers.ACTIVATIONS[cfg.activation])
        if "post_norm" in p["mlp"]:
            out = _norm(out, p["mlp"]["post_norm"], cfg)
        return x + out, chosen, pool, None


def _below(lora: Any, name: str) -> Any:
    return None if lora is None else lora.at(name)


def _attention(h_BTD, p, lora, cache: paged.Cache | None, ctx: Context, cfg: ModelConfig):
    B, T, _ = h_BTD.shape
    q, k, v = project_each(h_BTD, p, lora, ("q", "k", "v"))
    k, v = (y.reshape(B, T, -1, cfg.head_dim) for y in (k, v))
    q, gate = q.reshape(B, T, cfg.num_heads, -1), None
    if cfg.gated_attention:
        q, gate = jnp.split(q, 2, axis=-1)
    if cfg.qk_norm:
        # The norm's gradient needs its input. If only the output is kept, both projections run
        # twice, 6 % of the matmuls of a training step of Qwen3-4B.
        q, k = checkpoint_name(q, "query"), checkpoint_name(k, "key")
        q, k = _norm(q, p["q_norm"], cfg), _norm(k, p["k_norm"], cfg)
    q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)
    if ctx.growth is not None:
        q = (q * ctx.growth[..., None, None]).astype(q.dtype)
    scale, pool = cfg.head_dim**-0.5 if cfg.score_scale is None else cfg.score_scale, None
    if cache is None:
        assert ctx.segments is not None
        kernel = cfg.kernels.packed_attention
        keep, sinks = not cfg.qk_norm, p.get("sinks")
        out = packed_attention(q, k, v, ctx.segments, scale, ctx.keys, kernel, keep, sinks)
    else:
        # Heads before positions, so that a decode step reads one head's keys of all positions from
        # contiguous memory.
        new = {"k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
        own = {name: cache.pool[name] for name in new}
        how = cfg.kernels.paged_attention, ctx.window, p.get("sinks")
        out, kv = paged.grouped_query_attention(q, new, own, cache.layer, cache.view, scale, *how)
        pool = cache.pool | kv
    if gate is not None:
        out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
    return project(out.reshape(B, T, -1), p, lora, "o"), pool


def embed(params: Any, lora: AdapterView | None, tokens_BT: jax.Array) -> jax.Array:
    """Returns token embeddings ``[B, T, D]`` with the deltas of adapters on ``embed``."""
    table = params["embed"]["w"]
    x = stored.rows(table, tokens_BT, params["final_norm"].dtype)
    delta = (
        None if lora is None else embedding_delta(tokens_BT, lora.at("embed"), x.shape[-1], x.dtype)
    )
    return x if delta is None else x + delta


def logits(
    params: Any,
    lora: AdapterView | None,
    h_BTD: jax.Array,
    kernel: str = "xla",
    used: jax.Array | None = None,
) -> jax.Array:
    """Returns logits ``[B, T, V]`` float32, with the deltas of adapters on ``unembed``.

    Args:
        kernel: implementation of ``layer_matmul`` for few rows; only XLA's has a gradient.
        used: int32, number of the B x T tokens in use, at the front; None: all.
    """
    table = stored_unembed(params)
    chex.assert_shape(h_BTD, (None, None, stored.table_shape(table)[1]))
    few = h_BTD.shape[0] * h_BTD.shape[1] <= FEW_ROWS and sharding.one_device()
    packed = blocks.is_packed(table)
    with jax.named_scope("unembed"):
        if kernel != "xla" and (packed or few):
            (out,) = layer_matmul(
                *(h_BTD, (table[None],), jnp.int32(0), used),
                transposed=not packed,
                implementation=kernel,
            )
        else:
            out = product_f32("BTD,VD->BTV", h_BTD, stored.table(table, h_BTD.dtype))
        delta = None if lora is None else batch_delta(h_BTD, lora.at("unembed"), out.shape[-1])
        return out if delta is None else out + delta.astype(jnp.float32)
