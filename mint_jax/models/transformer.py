"""The decoder as pure functions over a parameter tree: ``abstract(cfg)``, ``hidden_states``,
``logits``.

Rows of all policies run through the base together; the model does not know the number of policies.

Axes: B rows, T tokens, L layers, V vocab, D model width, F ffw width, N query heads, K kv heads, H
head dim.
"""

import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
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
from mint_jax.models.attention import Context, Segments, packed_attention
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
    if (inputs := cfg.layer_inputs) is not None:
        width = cfg.num_layers * inputs.width
        specs["layer_inputs"] = {
            "table": ParamSpec((inputs.vocab_size, width), ("vocab", "embed"), dtype, fan_in=width),
            "projection": ParamSpec((width, D), (None, "embed"), dtype, fan_in=D),
            "norm": ParamSpec((inputs.width,), ("norm",), dtype, "ones"),
        }
    for stack, L in cfg.stacks.items():
        specs[stack] = {part: _specs(part, stack, L, cfg, dtype) for part in cfg.parts_of(stack)}
        if inputs is not None:
            specs[stack]["inputs"] = layers.input_specs(L, D, inputs.width, dtype)
        if cfg.layer_scale:
            specs[stack]["scale"] = ParamSpec((L, 1), ("layers", None), dtype, "ones")
    specs["final_norm"] = ParamSpec((D,), ("norm",), dtype, "ones")
    if not cfg.tie_embeddings:
        specs["unembed"] = table
    return quantised.specs(specs, quantise) if quantise else specs


def _specs(part: str, stack: str, L: int, cfg: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Returns one part of ``L`` stacked layers, see ``config.PARTS``."""
    own = cfg.of_stack(stack)
    if part == "attn" and cfg.latent is not None:
        return mla.specs(cfg, L, dtype) | dsa.specs(cfg, stack, dtype)
    if part == "mlp":
        D, names = cfg.d_model, ("norm", "post_norm") if cfg.post_norms else ("norm",)
        norms = {name: norm(L, D, dtype) for name in names}
        return norms | layers.mlp_matrices(L, own.d_ff, cfg, dtype)
    if part == "attn":
        return attention_specs(own, L, dtype, cfg.has_keys(stack))
    of = {"delta": delta.specs, "ssm": ssm.specs, "moe": moe.specs}
    return of[part](cfg, L, dtype)


def attention_specs(cfg: ModelConfig, L: int, dtype: Any, keys: bool = True) -> dict[str, Any]:
    """Returns the parameters of ``L`` stacked layers, without those of ``keys`` if False."""
    D, H, qkv = cfg.d_model, cfg.head_dim, cfg.qkv_bias
    attn: dict[str, Any] = {
        "norm": norm(L, D, dtype),
        # A head's gate comes after its query.
        "q": matrix("q", L, D, cfg.num_heads * H * (1 + cfg.gated_attention), dtype, qkv),
    }
    for name in ("k", "v") if keys and not cfg.value_is_key else ("k",) if keys else ():
        attn[name] = matrix(name, L, D, cfg.num_kv_heads * H, dtype, qkv)
    attn["o"] = matrix("o", L, cfg.num_heads * H, D, dtype, cfg.o_bias)
    if cfg.post_norms:
        attn["post_norm"] = norm(L, D, dtype)
    if cfg.sinks:
        attn["sinks"] = ParamSpec((L, cfg.num_heads), ("layers", "q_heads"), dtype, "zeros")
    if cfg.qk_norm:
        attn |= {name: norm(L, H, dtype) for name in ("q_norm", "k_norm")[: 1 + keys]}
    return attn


def stored_unembed(params: Any) -> jax.Array:
    """Returns the output matrix as stored, see ``stored.py``: the embedding if they are tied."""
    return (params["unembed"] if "unembed" in params else params["embed"])["w"]


def cache_heads(cfg: ModelConfig) -> int | None:
    """Returns the number that divides the heads of keys and values of all layers; None for
    latents, which all heads share.
    """
    if cfg.latent is not None:
        return None
    return math.gcd(cfg.num_kv_heads, (cfg if cfg.windows is None else cfg.near).num_kv_heads)


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

    names = {}
    if cfg.latent is not None:
        names = {"latent": entry(cfg.latent.kv_latent), "rope": entry(cfg.latent.rope)}
        names |= {} if cfg.indexer is None else {"index": entry(cfg.indexer.width)}
    out = {}
    for stack, L in cfg.stacks.items():
        own = cfg.of_stack(stack)
        if cfg.has_state(stack):
            assert cfg.state is not None
            out[stack] = state.cache_specs(cfg.state, L, states, dtype)
        elif cfg.has_keys(stack) and "attn" in cfg.parts_of(stack):
            make: dict[str, Any] = names or dict.fromkeys(
                "kv", entry(own.head_dim, own.num_kv_heads)
            )
            here = near if near is not None and cfg.has_window(stack) else pages
            out[stack] = {name: of(L, here) for name, of in make.items()}
    if routes and cfg.routed and cfg.experts is not None:
        # The smallest dtype that holds an expert's number.
        kind = jnp.uint8 if cfg.experts.count <= 256 else jnp.uint16
        of_layers = entry(cfg.experts.per_token, dtype=kind)
        out["routes"] = {stack: of_layers(cfg.stacks[stack]) for stack in cfg.routed_layers}
    return out


class LayerKeys(NamedTuple):
    """Keys and values of a layer that later layers attend to, too."""

    k: jax.Array  # of the current tokens, `[B, T, K, H]`, like v
    v: jax.Array
    cache: paged.Cache | None = None  # with earlier ones


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
        near = ctx._replace(window=windows.size, positions=positions_BT)
        if windows.theta is not None:
            cos, sin = layers.rope_tables(positions_BT, cfg.near)
            near = near._replace(cos=cos, sin=sin)
    with jax.named_scope("embed"):
        x = embed(params, lora, tokens_BT)
        if cfg.embed_scale != 1:
            x = x * jnp.asarray(cfg.embed_scale, x.dtype)
    B, T = tokens_BT.shape
    chosen, kept, added = dsa.undecided(B, T, view, cfg), {}, _layer_inputs(params, x, inputs, cfg)
    # Of layers whose keys later ones attend to, by kind: those of the last one so far.
    latest = {}
    for stack in cfg.stacks if cfg.shared_keys is not None else ():
        own, kind = cfg.of_stack(stack), cfg.kind_of(stack).removeprefix("shared_")
        none = jnp.zeros((B, T, own.num_kv_heads, own.head_dim), x.dtype)
        latest[kind] = LayerKeys(none, none)
    for group in cfg.groups:
        bound = []
        for stack in group:
            shared = None if cfg.has_keys(stack) else _shared(stack, latest, kept, view, cfg)
            of_stack = near if cfg.has_window(stack) else ctx
            more = added, shared, keep_routes
            bound.append(_bind(stack, params, lora, inputs, of_stack, cfg, *more))
        runs, xs = zip(*bound)
        if REMAT[remat] is not None:
            # Inside a scan XLA cannot merge the recomputation with the original, so the barriers
            # against that are not needed.
            policy = REMAT[remat]
            runs = tuple(jax.checkpoint(run, policy=policy, prevent_cse=False) for run in runs)

        def scanned(carry, layer_inputs, runs=runs, group=tuple(group)):
            x, chosen, pools, count, latest = carry
            pools, kept = list(pools), []
            for i, run in enumerate(runs):
                x, chosen, pools[i], routes, keys = run(x, chosen, pools[i], count, layer_inputs[i])
                kept.append(routes)
                if (kind := cfg.kind_of(group[i])) in latest:
                    latest = latest | {kind: keys}
            count = None if count is None else count + 1
            return (x, chosen, tuple(pools), count, latest), tuple(kept)

        # The pool is carried, not scanned over: as scan input and output it is copied in every step
        # (387 MB of temporaries instead of 17), and so would be the stacks of adapters.
        pools = tuple(None if view is None else _pool_of(inputs.pool, stack) for stack in group)
        counted = jnp.int32(0) if _counts(view) else None
        length = len(next(iter(group.values())))
        carry, routes = jax.lax.scan(scanned, (x, chosen, pools, counted, latest), xs, length)
        x, chosen, pools, _, latest = carry
        kept |= dict(zip(group, routes if view is None else pools))
    if view is not None and "routes" in inputs.pool:
        kept["routes"] = {stack: kept[stack].pop("routes") for stack in inputs.pool["routes"]}
    if view is not None:
        kept = {stack: pool for stack, pool in kept.items() if pool}
    with jax.named_scope("final_norm"):
        x = _norm(x, params["final_norm"], cfg)
    return x, kept


def _pool_of(pool: Any, stack: str) -> Any:
    """Returns one stack's part of a pool, with its routes."""
    recorded = pool.get("routes", {})
    return pool.get(stack, {}) | ({"routes": recorded[stack]} if stack in recorded else {})


def _shared(
    stack: str, latest: dict[str, LayerKeys], kept: Any, view: paged.View | None, cfg: ModelConfig
) -> LayerKeys:
    """Returns the keys and values that a stack without its own attends to."""
    keys, source = latest[cfg.kind_of(stack).removeprefix("shared_")], cfg.key_stack(stack)
    if view is None:
        return keys
    number = jnp.int32(cfg.stacks[source] - 1)
    return keys._replace(cache=paged.Cache(kept[source], number, view, cache_heads(cfg)))


def _layer_inputs(params, x_BTD, inputs: DecoderInputs, cfg: ModelConfig) -> jax.Array | None:
    """Returns what the layers add through their gates, ``[L, B, T, width]``: the mean of a norm of
    the embedding's projection and of embeddings of the tokens, times the root of 2.
    """
    if cfg.layer_inputs is None:
        return None
    (B, T, D), P, width = x_BTD.shape, params["layer_inputs"], cfg.layer_inputs.width
    with jax.named_scope("layer_inputs"):
        y = product_f32("BTD,FD->BTF", x_BTD, P["projection"]) * D**-0.5
        y = _norm(y.astype(x_BTD.dtype).reshape(B, T, -1, width), P["norm"], cfg)
        own = stored.rows(P["table"], inputs.tokens_BT, x_BTD.dtype).reshape(y.shape)
        mean = (y + own * jnp.asarray(width**0.5, y.dtype)) * jnp.asarray(0.5**0.5, y.dtype)
        return jnp.moveaxis(mean, 2, 0)


def _norm(x: jax.Array, scale: jax.Array, cfg: ModelConfig) -> jax.Array:
    return rms_norm(x, scale, cfg.norm_eps, cfg.norm_offset)


def _counts(view: paged.View | None) -> bool:
    """Returns True if layers count themselves: a GPU copies each slice of an array of numbers, and
    of vectors, by a launch of its own.
    """
    return view is not None and dispatch.platform_of_mesh() == "cuda"


def _bind(
    stack: str,
    params: Any,
    lora: AdapterView | None,
    inputs: DecoderInputs,
    ctx: Context,
    cfg: ModelConfig,
    added: jax.Array | None,
    shared: LayerKeys | None,
    keep_routes: bool,
) -> tuple[Any, Any]:
    """Returns a function of one layer of a stack, and its inputs to scan over."""
    view, replay = inputs.view, inputs.replay if stack in cfg.routed_layers else None
    scanned, whole = stacked.detach(params[stack], view is not None and sharding.one_device())
    adapters, apart = _below(lora, stack), None
    numbers, heads, own_cfg = cfg.layers_of(stack), cache_heads(cfg), cfg.of_stack(stack)
    if _counts(view):
        scanned, apart = stacked.side_by_side(scanned)

    def run(x, chosen, pool, count, layer_inputs):
        p, a, number, position, routes, extra = layer_inputs
        p, number = (p, number) if apart is None else (apart(p), count)
        used = None if view is None else view.used
        p = stacked.attach(p, whole, number, cfg.kernels.layer_matmul, used)
        a = None if adapters is None else adapters.in_layer(number, a)
        own = whole.get("attn", {}).get("indexer")
        indexer = None if position is None else dsa.Layer(own, *position)
        cache = None if view is None else paged.Cache(pool, number, view, heads)
        more = indexer, routes, ctx, own_cfg, shared
        x, chosen, pool, route, keys = _layer(x, chosen, p, a, cache, *more)
        if "inputs" in p:
            x = x + _added(x, extra, p["inputs"], _below(a, "inputs"), own_cfg)
        if "scale" in p:
            x = x * p["scale"].astype(x.dtype)[None, None]
        kept = {"routes": route.ids, "missed": route.missed} if keep_routes and route else {}
        return x, chosen, pool, kept, keys

    xs = (
        scanned,
        None if adapters is None else adapters.taps,
        jnp.arange(len(numbers)) if apart is None else None,
        dsa.positions(cfg, stack),
        None if replay is None else replay[cfg.routed_layers[stack]],
        None if added is None else added[np.array(numbers)],
    )
    return run, xs


def _added(x, extra, p, lora, cfg):
    with jax.named_scope("inputs"):
        gate = project(x, p, lora, "input_gate")
        out = project(layers.ACTIVATIONS[cfg.activation](gate, extra), p, lora, "input_out")
        return _norm(out, p["norm"], cfg)


def _layer(x, chosen, p, lora, cache, indexer, replay, ctx, cfg, shared):
    keys = None
    x = constrain(checkpoint_name(x, "residual"), "batch", "tokens", "act_embed")
    pool = None if cache is None else cache.pool
    if part := next((part for part in ("attn", "delta", "ssm") if part in p), ""):
        with jax.named_scope(part):
            h, own = _norm(x, p[part]["norm"], cfg), _below(lora, part)
            if part != "attn":
                mixer = delta.mixer if part == "delta" else ssm.mixer
                out, pool = mixer(h, p[part], own, ctx.lineage, cache, cfg)
            elif cfg.latent is None:
                out, pool, keys = _attention(h, p[part], own, cache, ctx, cfg, shared)
            else:
                arguments = h, p[part], own, cache, ctx, cfg
                out, pool, chosen = mla.latent_attention(*arguments, indexer, chosen)
        if "post_norm" in p[part]:
            out = _norm(out, p[part]["post_norm"], cfg)
        x = constrain(checkpoint_name(x + out, "residual"), "batch", "tokens", "act_embed")
    out = route = None
    if "mlp" in p:
        with jax.named_scope("mlp"):
            h = _norm(x, p["mlp"]["norm"], cfg)
            out = layers.mlp(h, p["mlp"], _below(lora, "mlp"), layers.ACTIVATIONS[cfg.activation])
    if "moe" in p:
        with jax.named_scope("moe"):
            h = _norm(x, p["moe"]["norm"], cfg)
            routed, route = moe.moe(h, p["moe"], _below(lora, "moe"), cfg, replay, x)
            if cache is not None and pool is not None and "routes" in pool:
                pool = pool | {"routes": paged.record(pool["routes"], route.ids, cache)}
            if out is not None:
                out = _norm(out, p["moe"]["mlp_norm"], cfg)
                out = out + _norm(routed, p["moe"]["post_norm"], cfg)
            else:
                out = routed
    if out is None:
        return x, chosen, pool, None, keys
    if "mlp" in p and "post_norm" in p["mlp"]:
        with jax.named_scope("mlp"):
            out = _norm(out, p["mlp"]["post_norm"], cfg)
    return x + out, chosen, pool, route, keys


def _below(lora: Any, name: str) -> Any:
    return None if lora is None else lora.at(name)


def _attention(
    h_BTD,
    p,
    lora,
    cache: paged.Cache | None,
    ctx: Context,
    cfg: ModelConfig,
    shared: LayerKeys | None,
):
    B, T, _ = h_BTD.shape
    names = tuple(name for name in ("q", "k", "v") if name in p)
    own = dict(zip(names, project_each(h_BTD, p, lora, names)))
    q, gate = own["q"].reshape(B, T, cfg.num_heads, -1), None
    if cfg.gated_attention:
        q, gate = jnp.split(q, 2, axis=-1)
    # The norm's gradient needs its input. If only the output is kept, both projections run twice,
    # 6 % of the matmuls of a training step of Qwen3-4B.
    keep = ("query", "key", "value")
    if cfg.qk_norm:
        q, keep = _norm(checkpoint_name(q, "query"), p["q_norm"], cfg), ("value",)
    q = rotate(q, ctx.cos, ctx.sin)
    if shared is not None:
        k, v, keep = shared.k, shared.v, () if cfg.qk_norm else ("query",)
    else:
        k, v = (own.get(x, own["k"]).reshape(B, T, -1, cfg.head_dim) for x in "kv")
        if cfg.qk_norm:
            k = checkpoint_name(k, "key")
        if cfg.value_norm:
            v, keep = checkpoint_name(v, "value"), keep[:-1]
            v = _norm(v, jnp.ones(v.shape[-1:], v.dtype), cfg.replace(norm_offset=0.0))
        k = _norm(k, p["k_norm"], cfg) if cfg.qk_norm else k
        if cache is not None and dispatch.platform_of_mesh() == "cuda":
            # otherwise XLA widens keys in a launch, and normalises them again for each half
            k = jax.lax.optimization_barrier(k)
        k = rotate(k, ctx.cos, ctx.sin)
    if ctx.growth is not None:
        q = (q * ctx.growth[..., None, None]).astype(q.dtype)
    scale, pool = cfg.head_dim**-0.5 if cfg.score_scale is None else cfg.score_scale, None
    if cache is None:
        assert ctx.segments is not None
        kernel, sinks = cfg.kernels.packed_attention, p.get("sinks")
        near = ctx.window, ctx.positions
        out = packed_attention(q, k, v, ctx.segments, scale, None, kernel, keep, sinks, *near)
    else:
        # Heads before positions, so that a decode step reads one head's keys of all positions from
        # contiguous memory.
        new = {"k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
        at = cache if shared is None or shared.cache is None else shared.cache
        pages = {name: at.pool[name] for name in new}
        how = cfg.kernels.paged_attention, ctx.window, p.get("sinks"), at.heads, shared is None
        out, kv = paged.grouped_query_attention(q, new, pages, at.layer, at.view, scale, *how)
        pool = cache.pool | kv
    if gate is not None:
        out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
    keys = LayerKeys(k, v) if shared is None and cfg.shared_keys is not None else None
    return project(out.reshape(B, T, -1), p, lora, "o"), pool, keys


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
    cap: float | None = None,
) -> jax.Array:
    """Returns logits ``[B, T, V]`` float32, with the deltas of adapters on ``unembed``.

    Args:
        kernel: implementation of ``layer_matmul`` for few rows; only XLA's has a gradient.
        used: int32, number of the B x T tokens in use, at the front; None: all.
        cap: ``ModelConfig.logit_cap``.
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
        return capped(out if delta is None else out + delta.astype(jnp.float32), cap)


def capped(z: jax.Array, cap: float | None) -> jax.Array:
    """Returns ``cap * tanh(z / cap)``; ``z`` without a cap."""
    return z if cap is None else cap * jnp.tanh(z / cap)
