"""The lightning indexer of DeepSeek sparse attention (V3.2, arXiv 2512.02556, section 2.1).

``score_ts = sum_i w_ti relu(q_ti . k_s)``: the ``topk`` best visible keys are chosen. In GLM-5 a
layer without an indexer reuses the choice of the last one with it, so the choice is carried with
the residual stream: a bit per pair, in an array per part of the keys; None while all keys fit.

Axes: B rows, T query tokens, S key positions, D model width, C the query's latent, I heads, H their
width, U pages.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mint_jax import sharding
from mint_jax.models import attention, paged
from mint_jax.models.attention import Context, Segments, slice_count, split, unsplit
from mint_jax.models.config import Indexer, ModelConfig
from mint_jax.models.layers import rotate, rotate_pairs
from mint_jax.params import ParamSpec
from pallas_kernels.paged import last_run, read, run_pages, seen_in_run

KEY_NORM_EPS = 1e-6
# Bits [B, T, ceil(S / 8)] of each part; the row's new tokens come last.
Chosen = tuple[jax.Array, ...] | None


class Layer(NamedTuple):
    """One layer's place among the indexers of its stack."""

    stack: Any  # `[L_full, ...]`; None if no layer of the stack has one
    nth: Any  # int32, index of its indexer
    full: Any  # bool, the layer has an indexer; None if all layers of the stack have one


def specs(cfg: ModelConfig, kind: str, dtype: Any) -> dict[str, Any]:
    """Returns ``{"indexer": ...}`` for the layers of one kind that have one; ``{}`` if none has."""
    if cfg.indexer is None:
        return {}
    assert cfg.latent is not None
    ix, L = cfg.indexer, sum(_full(cfg, kind))
    norm = {
        "scale": ParamSpec((L, ix.width), ("layers", "norm"), dtype, "ones"),
        "bias": ParamSpec((L, ix.width), ("layers", "norm"), dtype, "zeros"),
    }
    latent = cfg.latent.q_latent, ix.heads * ix.width
    leaves = {
        "q": ParamSpec((L, *latent), ("layers", "latent", "q_heads"), dtype),
        "k": ParamSpec((L, cfg.d_model, ix.width), ("layers", "embed", None), dtype),
        "k_norm": norm,
        "weights": ParamSpec((L, cfg.d_model, ix.heads), ("layers", "embed", None), dtype),
    }
    return {"indexer": leaves} if L else {}


def _full(cfg: ModelConfig, kind: str) -> list[bool]:
    assert cfg.indexer is not None
    return [cfg.indexer.full[layer] for layer in cfg.layers_of(kind)]


def positions(cfg: ModelConfig, kind: str) -> tuple[Any, Any] | None:
    """Returns the positions of the layers of one kind, to be scanned; None without indexers."""
    if cfg.indexer is None:
        return None
    full = np.array(_full(cfg, kind))
    nth = np.maximum(np.cumsum(full) - 1, 0).astype(np.int32)
    return nth, None if full.all() else full


def undecided(B: int, T: int, view: paged.View | None, cfg: ModelConfig) -> Chosen:
    """Returns the first layer's input: an empty choice, or None if all keys fit."""
    sizes = [*(() if view is None else (view.capacity,)), T]
    if cfg.indexer is None or sum(sizes) <= cfg.indexer.topk:
        return None
    return tuple(jnp.zeros((B, T, -(-S // 8)), jnp.uint8) for S in sizes)


def select(
    h_BTD: jax.Array,
    q_latent_BTC: jax.Array,
    layer: Layer,
    cache: paged.Cache | None,
    ctx: Context,
    cfg: ModelConfig,
    chosen: Chosen,
) -> tuple[Chosen, paged.Cache | None]:
    """Returns this layer's choice, and the cache with the indexer's keys of these tokens.

    Args:
        cache: as in ``latent_attention``, with ``index [L, U, PAGE, H]``.
        chosen: choice of the previous layer, see ``undecided``.
    """
    assert cfg.indexer is not None
    ix = cfg.indexer
    # The choice has no derivative and indexers are frozen. Without stop_gradient the backward pass
    # would store and run matmuls that contribute nothing.
    h_BTD, q_latent_BTC, stack = jax.lax.stop_gradient((h_BTD, q_latent_BTC, layer.stack))

    def weights() -> Any:
        return jax.tree.map(
            lambda w: jax.lax.dynamic_index_in_dim(w, layer.nth, keepdims=False), stack
        )

    def where_full(decide: Any, otherwise: Any) -> Any:
        # Which layers have an indexer is data of the scan. With a condition the other layers pay
        # nothing; with a select every layer would score all keys.
        if stack is None:
            return otherwise()
        return decide() if layer.full is None else jax.lax.cond(layer.full, decide, otherwise)

    with jax.named_scope("indexer"):
        k_BTH = where_full(
            lambda: _keys(h_BTD, weights(), ctx, ix, cfg),
            lambda: jnp.zeros((*h_BTD.shape[:2], ix.width), h_BTD.dtype),
        )
        if cache is not None:
            index = paged.record(cache.pool["index"], k_BTH, cache)
            cache = cache._replace(pool=cache.pool | {"index": index})
        if chosen is not None:

            def decide() -> Chosen:
                q_BTIH, w_BTI = _queries(h_BTD, q_latent_BTC, weights(), ctx, ix, cfg)
                if cache is not None:
                    return _choose_cached(q_BTIH, w_BTI, k_BTH, cache, ix.topk)
                assert ctx.segments is not None
                return (_choose_packed(q_BTIH, w_BTI, k_BTH, ctx.segments, ix.topk),)

            chosen = where_full(decide, lambda: chosen)
    return jax.tree.map(lambda bits: checkpoint_name(bits, "chosen"), chosen), cache


def _product(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _keys(h_BTD, p, ctx: Context, ix: Indexer, cfg: ModelConfig) -> jax.Array:
    k = _product("BTD,DH->BTH", h_BTD, p["k"])
    k = _layer_norm(k, p["k_norm"])
    return _with_position(k[:, :, None], ctx, ix, cfg)[:, :, 0]


def _queries(h_BTD, q_latent_BTC, p, ctx, ix, cfg):
    """Returns queries ``[B, T, I, H]`` and float32 weights ``[B, T, I]``, constants included."""
    B, T, _ = h_BTD.shape
    q = _product("BTC,CF->BTF", q_latent_BTC, p["q"])
    w = _product("BTD,DI->BTI", h_BTD, p["weights"])
    q_BTIH = _with_position(q.reshape(B, T, ix.heads, ix.width), ctx, ix, cfg)
    return q_BTIH, w.astype(jnp.float32) * (ix.heads * ix.width) ** -0.5


def _layer_norm(x_BTH: jax.Array, p: Any) -> jax.Array:
    """LayerNorm (Ba et al. 2016, arXiv 1607.06450) in float32."""
    x = x_BTH.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    inv = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + KEY_NORM_EPS)
    scale, bias = (p[name].astype(jnp.float32)[None, None] for name in ("scale", "bias"))
    return (centred * inv * scale + bias).astype(x_BTH.dtype)


def _with_position(x_BTIH: jax.Array, ctx: Context, ix: Indexer, cfg: ModelConfig) -> jax.Array:
    """Rotates the first ``rope_dim`` dimensions of each head."""
    rotated, rest = jnp.split(x_BTIH, [cfg.rope_dim], axis=-1)
    rotation = rotate_pairs if ix.interleaved else rotate
    return jnp.concatenate([rotation(rotated, ctx.cos, ctx.sin), rest], axis=-1)


def _scores(q_BTIH: jax.Array, w_BTI: jax.Array, k_BSH: jax.Array) -> jax.Array:
    """Returns ``sum_i w_i relu(q_i . k)``, ``[B, T, S]`` float32, by groups of heads."""
    (B, T, heads), S = w_BTI.shape, k_BSH.shape[1]
    n = slice_count(heads, 4 * w_BTI.size * S // sharding.parts_here(B, "batch"))

    def add(sums, group):
        q, w = group
        s = jnp.einsum("BTIH,BSH->BTIS", q, k_BSH, preferred_element_type=jnp.float32)
        s = jax.nn.relu(s)
        return sums + jnp.einsum("BTIS,BTI->BTS", s, w, preferred_element_type=jnp.float32), None

    zeros = jnp.zeros((B, T, S), jnp.float32)
    if n == 1:
        return add(zeros, (q_BTIH, w_BTI))[0]
    return jax.lax.scan(add, zeros, (split(q_BTIH, n, 2), split(w_BTI, n, 2)))[0]


def _best(parts: list[jax.Array], topk: int) -> tuple[jax.Array, ...]:
    """Returns the bits of the ``topk`` largest scores over all parts; ties are all chosen."""
    # A query with fewer than topk visible keys also gets invisible ones, which attention masks.
    # A cache's parts are split over devices by position. The best of each part are few and may be
    # communicated; the scores of all positions stay in place and are cut at one threshold.
    tops = [jax.lax.top_k(s, min(topk, s.shape[-1]))[0] for s in parts]
    last = jax.lax.top_k(jnp.concatenate(tops, axis=-1), topk)[0][..., -1:]
    return tuple(attention.pack_keys(s >= last) for s in parts)


def _choose_packed(q_BTIH, w_BTI, k_BSH, segments: Segments, topk: int) -> jax.Array:
    T = q_BTIH.shape[1]
    n = slice_count(T, 4 * w_BTI.size * T // sharding.parts_here(len(w_BTI), "batch"))

    def one(slices):
        q, w, own, parent, start = slices
        s = _scores(q, w, k_BSH)
        visible = attention.segment_mask(own, parent, segments.own, start)
        return _best([jnp.where(visible, s, -jnp.inf)], topk)[0]

    if n == 1:
        return one((q_BTIH, w_BTI, *segments, 0))
    slices = *(split(x, n, 1) for x in (q_BTIH, w_BTI, *segments)), jnp.arange(n) * (T // n)
    return unsplit(jax.lax.map(one, slices), 1)


def _choose_cached(q_BTIH, w_BTI, k_BTH, cache: paged.Cache, topk: int) -> Chosen:
    """Returns the choice over a cache's positions (prefix, then own) and the new tokens' keys."""

    def local(q_BTIH, w_BTI, k_BTH, pool, layer, view):
        B, T = w_BTI.shape[:2]

        # Every row reads its prefix itself, not in a team, because its keys are its own choice.
        def fill(run, scores):
            run_B = jnp.full((B,), run, jnp.int32)
            k_BSH = read(pool, layer, run_pages(view.table, run_B), k_BTH.shape[-1])
            s = _scores(q_BTIH, w_BTI, k_BSH)
            s = jnp.where(seen_in_run(view.prefix, view.own, run_B)[:, None], s, -jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(scores, s, run * paged.RUN, 2)

        nothing = jnp.full((B, T, view.capacity), -jnp.inf, jnp.float32)
        past = jax.lax.fori_loop(0, jnp.max(last_run(view.prefix, view.own)), fill, nothing)
        own = jnp.where(attention.causal(T)[None], _scores(q_BTIH, w_BTI, k_BTH), -jnp.inf)
        return _best([past, own], topk)

    rows, _ = sharding.cache_axes(None)
    of_rows, of_pages = (rows, None, None), (None, rows, None, None)
    specs = (rows, None, None, None), of_rows, of_rows, of_pages, (), (rows, None)
    args = q_BTIH, w_BTI, k_BTH, cache.pool["index"], cache.layer, cache.view
    return sharding.over_devices(local, args, specs, (of_rows,) * 2)
