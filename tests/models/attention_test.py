"""Attention over packed rows and over caches: values and gradients against a plain float64 softmax in torch.

Axes: B rows, T tokens, S keys, N query heads, K kv heads, G query heads per kv head, H head dim, C cached prompts.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from mint_jax.models import attention
from mint_jax.models.attention import Past, Segments, cached_attention, packed_attention

SCALE = 0.4
CACHED = jax.jit(cached_attention, static_argnums=4)


def _torch(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, scale, g_BTNH=None):
    """Softmax attention by the book in float64, and its gradients with respect to q, k, v when ``g`` is given."""
    leaves = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (q_BTNH, k_BSKH, v_BSKH)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = scores.masked_fill(~torch.tensor(allowed_BTS)[:, None], -torch.inf)
    out = torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v)
    grads = [] if g_BTNH is None else torch.autograd.grad(out, leaves, torch.tensor(np.asarray(g_BTNH, np.float64)))
    return out.detach().numpy(), *(g.numpy() for g in grads)


def _allowed(own_BT, parent_BT):
    """Token by token: which earlier tokens each one sees."""
    B, T = own_BT.shape
    rows = [[[s <= t and own_BT[b, s] in (own_BT[b, t], parent_BT[b, t]) for s in range(T)] for t in range(T)] for b in range(B)]
    return np.array(rows)


def _segments(rng, B, T):
    """Rows cut at random into segments; each has an earlier one, or itself, as its parent."""
    own_BT = np.sort(rng.integers(0, 5, size=(B, T)), axis=1)
    parents_BS = np.stack([[rng.integers(0, s + 1) for s in range(5)] for _ in range(B)])
    return Segments(own_BT.astype(np.int32), np.take_along_axis(parents_BS, own_BT, axis=1).astype(np.int32))


def _ours(q, k, v, g, segments, chosen=None):
    """Values and gradients with respect to q, k, v."""

    @jax.jit  # anew in every test: some change SCORE_BYTES
    def run(q, k, v, g, segments, chosen):
        out, vjp = jax.vjp(lambda q, k, v: packed_attention(q, k, v, segments, SCALE, chosen), q, k, v)
        return out, *vjp(g)

    return run(q, k, v, g, segments, chosen)


def _normal(rng, *shape, dtype=np.float32):
    return rng.normal(size=shape).astype(dtype)


@pytest.mark.parametrize(
    ("B", "T", "N", "K", "score_bytes"),
    [
        (2, 5, 4, 4, None),  # shorter than a block, one query head per kv head
        (2, 150, 6, 2, None),  # three blocks, the last one short
        (1, 600, 2, 1, None),  # eight blocks, no longer of the least size
        (2, 100, 4, 2, 40_000),  # every block's scores in slices
    ],
)
def test_packed_values_and_gradients_equal_a_plain_softmax(B, T, N, K, score_bytes, rng, monkeypatch):
    H = 8
    if score_bytes is not None:
        monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
        counts = [attention._slices(jnp.zeros((B, K, N // K, min(64, T - start), H)), start + 64) for start in range(0, T, 64)]
        assert min(counts) > 1
    q, k, v, g = _normal(rng, B, T, N, H) * 2, _normal(rng, B, T, K, H), _normal(rng, B, T, K, H), _normal(rng, B, T, N, H)
    segments = _segments(rng, B, T)
    for ours, theirs in zip(_ours(q, k, v, g, segments), _torch(q, k, v, _allowed(*segments), SCALE, g)):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)  # float32 sums over up to 600 keys or queries


@pytest.mark.parametrize("score_bytes", [None, 40_000])
def test_values_of_another_width_and_chosen_keys(score_bytes, rng, monkeypatch):
    B, T, N, K, H, V = 2, 100, 4, 2, 8, 5
    if score_bytes is not None:
        monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
    q, k, v, g = _normal(rng, B, T, N, H) * 2, _normal(rng, B, T, K, H), _normal(rng, B, T, K, V), _normal(rng, B, T, N, V)
    segments = _segments(rng, B, T)
    chosen_BTT = rng.random((B, T, T)) < 0.5
    chosen_BTT[:, range(T), range(T)] = True  # a token sees something
    bits = attention.pack_keys(jnp.asarray(chosen_BTT))
    assert bits.shape == (B, T, 13)
    theirs = _torch(q, k, v, _allowed(*segments) & chosen_BTT, SCALE, g)
    for ours, want in zip(_ours(q, k, v, g, segments, bits), theirs):
        np.testing.assert_allclose(ours, want, atol=2e-5)  # as above


def test_bfloat16_rounds_weights_and_scores_only(rng):
    B, T, N, K, H = 2, 40, 4, 2, 16
    q, k, v, g = (_normal(rng, B, T, heads, H, dtype=ml_dtypes.bfloat16) for heads in (N, K, K, N))
    segments = _segments(rng, B, T)
    for ours, theirs in zip(_ours(q, k, v, g, segments), _torch(q, k, v, _allowed(*segments), SCALE, g)):
        assert ours.dtype == jnp.bfloat16
        # weights (or dS), the stored o and the result are each rounded to 2**-8, relative to the largest entries
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, atol=3 * 2**-8 * np.abs(theirs).max())


def test_other_segments_and_later_tokens_cannot_be_seen(rng):
    T, segments = 12, Segments(*(np.array([row], np.int32) for row in ([0] * 4 + [1] * 4 + [2] * 4, [0] * 8 + [0] * 4)))
    q, k, v = _normal(rng, 1, T, 2, 4), _normal(rng, 1, T, 1, 4), _normal(rng, 1, T, 1, 4)
    attend = jax.jit(packed_attention, static_argnums=4)
    out = attend(q, k, v, segments, 0.5)
    hidden = np.r_[4:8, 10:12]  # what token 9, of segment 2 with parent 0, must not see
    k[:, hidden], v[:, hidden] = 1e4, 1e4
    np.testing.assert_array_equal(attend(q, k, v, segments, 0.5)[:, 9], out[:, 9])


def _heads_first(x):
    """``[B, T, K, H]`` as caches keep it, ``[B, K, T, H]``, and back."""
    return x.swapaxes(1, 2)


@pytest.mark.parametrize("T", [1, 4])
def test_cached_values_equal_a_plain_softmax_over_what_is_valid(T, rng):
    B, N, K, H = 6, 4, 2, 8
    sizes, rooms = (2, 6), (7, 5)  # prompts shared by three rows each, then the rows' own earlier tokens
    lengths = [np.array([7, 4], np.int32), rng.integers(0, 6, size=6).astype(np.int32)]
    lengths[1][:2] = 0, 5
    past = Past(*(tuple(_normal(rng, C, K, S, H) for C, S in zip(sizes, rooms)) for _ in "kv"), tuple(lengths))
    q, k, v = _normal(rng, B, T, N, H), _normal(rng, B, T, K, H), _normal(rng, B, T, K, H)
    out = CACHED(q, _heads_first(k), _heads_first(v), past, SCALE)
    for b in range(B):
        parts = [[_heads_first(x)[b * C // B, : n[b * C // B]] for C, x, n in zip(sizes, xs, lengths)] for xs in (past.k, past.v)]
        keys, values = (np.concatenate([*seen, own[b]])[None] for seen, own in zip(parts, (k, v)))
        before = keys.shape[1] - T
        allowed = np.arange(before + T)[None] <= before + np.arange(T)[:, None]
        (want,) = _torch(q[b : b + 1], keys, values, allowed[None], SCALE)
        np.testing.assert_allclose(out[b : b + 1], want, atol=1e-5)  # float32 sums over a dozen keys


def test_a_scalar_length_holds_for_every_row(rng):
    q, k, v = _normal(rng, 3, 1, 2, 4), _normal(rng, 3, 1, 1, 4), _normal(rng, 3, 1, 1, 4)
    cached = _normal(rng, 3, 1, 5, 4)
    scalar = CACHED(q, k, v, Past((cached,), (cached,), (jnp.int32(3),)), SCALE)
    each = CACHED(q, k, v, Past((cached,), (cached,), (jnp.full((3,), 3, jnp.int32),)), SCALE)
    np.testing.assert_array_equal(scalar, each)


def test_cached_attention_continues_packed_attention(rng):
    B, T, split, N, K, H = 2, 90, 70, 4, 2, 8
    q, k, v = _normal(rng, B, T, N, H), _normal(rng, B, T, K, H), _normal(rng, B, T, K, H)
    zeros = np.zeros((B, T), np.int32)
    full = jax.jit(packed_attention, static_argnums=4)(q, k, v, Segments(zeros, zeros), SCALE)
    k, v = _heads_first(k), _heads_first(v)
    past = Past((k[:, :, :split],), (v[:, :, :split],), (jnp.int32(split),))
    rest = CACHED(q[:, split:], k[:, :, split:], v[:, :, split:], past, SCALE)
    np.testing.assert_allclose(rest, full[:, split:], atol=1e-5)  # float32, sums in another order
