"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all
heads from one latent ``c`` of a token, ``W_kv_b c``, plus one rotary key.

Rows without a cache expand the latents. A cache holds latents and rotary keys only: ``W_kv_b`` is
absorbed into query and output (section 2.1.2), ``q^T (W_k c) = (W_k^T q)^T c``.

Axes: B rows, T tokens, S key positions, N heads, C latent, H dimensions of a head's key without
position, J rotary ones, V of a value, P blocks of rows with one adapter, R rank, M = T N, U pages.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mint_jax import sharding
from mint_jax.lora.view import AdapterView, Apply
from mint_jax.models import dsa, paged
from mint_jax.models.attention import Context, causal, packed_attention, unpack_keys
from mint_jax.models.config import Latent, ModelConfig, yarn_mscale
from mint_jax.models.layers import matrix, norm, project, project_each, rms_norm, rotate_pairs
from pallas_kernels import latent_attention as latent_kernels
from pallas_kernels.partial import join

LATENT_EPS = 1e-6  # of the norms on latents, independent of the residual stream's


def specs(cfg: ModelConfig, L: int, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of ``L`` layers; ``q``, or ``q_a`` and ``q_b`` with a q latent."""
    D, N, m = cfg.d_model, cfg.num_heads, _latent(cfg)
    width = N * (m.nope + m.rope)
    attn: dict[str, Any] = {"norm": norm(L, D, dtype)}
    if m.q_latent:
        attn["q_a"] = matrix("q_a", L, D, m.q_latent, dtype)
        attn["q_a_norm"] = norm(L, m.q_latent, dtype)
        attn["q_b"] = matrix("q_b", L, m.q_latent, width, dtype)
    else:
        attn["q"] = matrix("q", L, D, width, dtype)
    return attn | {
        "kv_a": matrix("kv_a", L, D, m.kv_latent + m.rope, dtype),
        "kv_a_norm": norm(L, m.kv_latent, dtype),
        "kv_b": matrix("kv_b", L, m.kv_latent, N * (m.nope + m.value), dtype),
        "o": matrix("o", L, N * m.value, D, dtype),
    }


def _latent(cfg: ModelConfig) -> Latent:
    assert cfg.latent is not None
    return cfg.latent


def scale(cfg: ModelConfig) -> float:
    """Returns the factor on scores: ``(nope + rope)^-1/2``, times YaRN's temperature squared."""
    m, scaling = _latent(cfg), cfg.rope_scaling
    plain = (m.nope + m.rope) ** -0.5
    if scaling is None or not scaling.mscale_all_dim:
        return plain
    return plain * yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def latent_attention(
    h_BTD: jax.Array,
    p: Any,
    lora: AdapterView | None,
    cache: paged.Cache | None,
    ctx: Context,
    cfg: ModelConfig,
    indexer: dsa.Layer | None = None,
    chosen: dsa.Chosen = None,
) -> tuple[jax.Array, Any, dsa.Chosen]:
    """Returns attention of one layer ``[B, T, D]``, the pool with these tokens, and the keys
    chosen.

    Args:
        h_BTD: the normalised residual stream.
        cache: ``{"latent": [L, U, PAGE, C], "rope": [L, U, PAGE, J]}``, and ``index`` with
            indexers.
        chosen: keys chosen by the previous layer, see ``dsa.undecided``.
    """
    B, T, _ = h_BTD.shape
    m = _latent(cfg)
    q_latent, (q, kv_a) = None, project_each(h_BTD, p, lora, ("q_a" if m.q_latent else "q", "kv_a"))
    if m.q_latent:
        q_latent = checkpoint_name(rms_norm(q, p["q_a_norm"], LATENT_EPS), "latent")
        q = project(q_latent, p, lora, "q_b")
    q_BTNH, q_BTNJ = jnp.split(q.reshape(B, T, cfg.num_heads, m.nope + m.rope), [m.nope], axis=-1)
    q_BTNJ = rotate_pairs(q_BTNJ, ctx.cos, ctx.sin)
    kv_a = checkpoint_name(kv_a, "latent")
    latent_BTC = rms_norm(kv_a[..., : m.kv_latent], p["kv_a_norm"], LATENT_EPS)
    rope_BTJ = rotate_pairs(kv_a[:, :, None, m.kv_latent :], ctx.cos, ctx.sin)[:, :, 0]
    if indexer is not None:
        assert q_latent is not None
        chosen, cache = dsa.select(h_BTD, q_latent, indexer, cache, ctx, cfg, chosen)
    # Two forms of one product. Expanded, each head has its own keys and values: fewer operations
    # per pair (nope + rope + value numbers instead of 2 latent + rope), which matters if all tokens
    # are new. Absorbed, the expansion moves from keys to queries: a cache stores latent + rope
    # numbers per token (576 in DeepSeek-V3) instead of heads (nope + rope + value) = 40,960, and
    # decoding reads the whole cache for one token.
    pool = None
    if cache is None:
        out_BTNV = _expanded(q_BTNH, q_BTNJ, latent_BTC, rope_BTJ, p, lora, ctx, cfg, chosen)
    else:
        new = {"latent": latent_BTC, "rope": rope_BTJ}
        out_BTNV, pool = _absorbed(q_BTNH, q_BTNJ, new, cache, p, lora, cfg, chosen)
    return project(out_BTNV.reshape(B, T, -1), p, lora, "o"), pool, chosen


def _expanded(q_BTNH, q_BTNJ, latent_BTC, rope_BTJ, p, lora, ctx, cfg, chosen):
    B, T, N, _ = q_BTNH.shape
    m = _latent(cfg)
    assert ctx.segments is not None
    kv = project(latent_BTC, p, lora, "kv_b").reshape(B, T, N, m.nope + m.value)
    k_BTNH, v_BTNV = jnp.split(kv, [m.nope], axis=-1)
    shared_BTNJ = jnp.broadcast_to(rope_BTJ[:, :, None], (B, T, N, m.rope))
    q = jnp.concatenate([q_BTNH, q_BTNJ], axis=-1)
    k = jnp.concatenate([k_BTNH, shared_BTNJ], axis=-1)
    bits = None if chosen is None else chosen[0]
    # No kernel supports chosen keys.
    kernel = cfg.kernels.packed_attention if chosen is None else "auto"
    return packed_attention(q, k, v_BTNV, ctx.segments, scale(cfg), bits, kernel)


def _absorbed(q_BTNH, q_BTNJ, new, cache, p, lora, cfg, chosen):
    """Attends to cached latents and causally to the new tokens' own; also returns the new pool."""
    m = _latent(cfg)
    w_CNF = p["kv_b"]["w"].reshape(m.kv_latent, cfg.num_heads, m.nope + m.value)
    adapters = None if lora is None else lora.at("kv_b")
    q_BTNC = sharding.constrain(
        _absorb_key(q_BTNH, w_CNF[..., : m.nope], adapters, m), "batch", None, "q_heads", None
    )
    factor = scale(cfg)

    def local(q_BTNC, q_BTNJ, new, pool, layer, view, chosen):
        B, T, N, _ = q_BTNC.shape
        pool = {name: paged.write(pool[name], layer, new[name], view) for name in pool}
        queries = q_BTNC.reshape(B, T * N, -1), q_BTNJ.reshape(B, T * N, -1)

        def read(queries, rows, chosen):
            q_C, q_J = queries
            args = q_C, q_J, pool["latent"], pool["rope"], rows, chosen
            # No kernel supports chosen keys.
            kernel = cfg.kernels.latent_attention if chosen is None else "auto"
            return latent_kernels.latent_attention(*args, scale=factor, implementation=kernel)

        def mixed(whole):
            return (whole.value / jnp.where(whole.total == 0, 1.0, whole.total)).astype(
                q_BTNC.dtype
            )

        if T == 1 and chosen is None:  # already in its page; unused rows read nothing
            at = view._replace(own=view.after)
            whole = paged.attend(at, jnp.int32(layer), queries, read)
            return mixed(whole).reshape(q_BTNC.shape), pool
        past, own_mask = None, causal(T)[None]
        if chosen is not None:
            past = unpack_keys(chosen[0], view.capacity).reshape(B, T, -1, paged.RUN)
            own_mask = own_mask & unpack_keys(chosen[1], T)
        own = latent_kernels.xla.scored(
            *queries, new["latent"], new["rope"], jnp.broadcast_to(own_mask, (B, T, T)), factor
        )
        whole = join(paged.attend(view, jnp.int32(layer), queries, read, past), own)
        return mixed(whole).reshape(q_BTNC.shape), pool

    rows, _ = sharding.cache_axes(None)
    of_rows, of_pages = (rows, None, None, None), (None, rows, None, None)
    own_pool = {name: cache.pool[name] for name in new}
    args = q_BTNC, q_BTNJ, new, own_pool, cache.layer, cache.view, chosen
    specs = of_rows, of_rows, (rows, None, None), of_pages, (), (rows, None), (rows, None, None)
    o_BTNC, pool = sharding.over_devices(
        local, args, specs, (of_rows, dict.fromkeys(new, of_pages))
    )
    o_BTNC = sharding.constrain(o_BTNC, "batch", None, "q_heads", None)
    return _absorb_value(o_BTNC, w_CNF[..., m.nope :], adapters, m), cache.pool | pool


def _einsum(subscripts: str, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum(subscripts, x, w, preferred_element_type=jnp.float32).astype(dtype)


def _absorb_key(q_BTNH, w_CNH, adapters: AdapterView | None, m: Latent):
    """Returns ``W_k^T q`` with its adapters' part, ``[B, T, N, C]``, to multiply latents by."""
    N, dtype = q_BTNH.shape[2], q_BTNH.dtype

    # Factor by factor, W_k + B_k A giving W_k^T q + A^T (B_k^T q): no merged weights exist.
    def delta(factors, q_PWTNH):
        b_PRNH = _heads(factors["b"], N)[..., : m.nope]
        z = _einsum("PWTNH,PRNH->PWTNR", q_PWTNH, b_PRNH, dtype)
        return _einsum("PWTNR,PRC->PWTNC", z, factors["a"], dtype)

    out = _einsum("BTNH,CNH->BTNC", q_BTNH, w_CNH, dtype)
    return _plus(out, delta, q_BTNH, adapters)


def _absorb_value(o_BTNC, w_CNV, adapters: AdapterView | None, m: Latent):
    """Returns ``W_v o`` with its adapters' part, ``[B, T, N, V]``, of weighted sums of latents."""
    N, dtype = o_BTNC.shape[2], o_BTNC.dtype

    def delta(factors, o_PWTNC):
        b_PRNV = _heads(factors["b"], N)[..., m.nope :]
        z = _einsum("PWTNC,PRC->PWTNR", o_PWTNC, factors["a"], dtype)
        return _einsum("PWTNR,PRNV->PWTNV", z, b_PRNV, dtype)

    out = _einsum("BTNC,CNV->BTNV", o_BTNC, w_CNV, dtype)
    return _plus(out, delta, o_BTNC, adapters)


def _heads(b_PRF: jax.Array, N: int) -> jax.Array:
    return b_PRF.reshape(*b_PRF.shape[:2], N, -1)


def _plus(out: jax.Array, delta: Apply, x: jax.Array, adapters: AdapterView | None) -> jax.Array:
    N, width = out.shape[2:]
    added = None if adapters is None else adapters.over(delta, x, N * width, out.dtype, N)
    return out if added is None else out + added.reshape(out.shape)
