"""Attention over packed rows: values and gradients against a plain float64 softmax in torch; and
through pages as in one row.

Axes: B rows, T tokens, S keys, N query heads, K kv heads, G query heads per kv head, H head dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax.models import attention
from mint_jax.models.attention import Segments, packed_attention

SCALE = 0.4


def _torch(q_BTNH, k_BSKH, v_BSKH, allowed_BTS, scale, g_BTNH=None):
    """Softmax attention by the book in float64, and its gradients with respect to q, k, v when
    ``g`` is given.
    """
    leaves = [
        torch.tensor(np.asarray(x, np.float64), requires_grad=True)
        for x in (q_BTNH, k_BSKH, v_BSKH)
    ]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = scores.masked_fill(~torch.tensor(allowed_BTS)[:, None], -torch.inf)
    out = torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v)
    grads = (
        []
        if g_BTNH is None
        else torch.autograd.grad(out, leaves, torch.tensor(np.asarray(g_BTNH, np.float64)))
    )
    return out.detach().numpy(), *(g.numpy() for g in grads)


def _allowed(own_BT, parent_BT):
    """Token by token: which earlier tokens each one sees."""
    B, T = own_BT.shape
    rows = [
        [
            [s <= t and own_BT[b, s] in (own_BT[b, t], parent_BT[b, t]) for s in range(T)]
            for t in range(T)
        ]
        for b in range(B)
    ]
    return np.array(rows)


def _segments(rng, B, T):
    """Rows cut at random into segments; each has an earlier one, or itself, as its parent."""
    own_BT = np.sort(rng.integers(0, 5, size=(B, T)), axis=1)
    parents_BS = np.stack([[rng.integers(0, s + 1) for s in range(5)] for _ in range(B)])
    return Segments(
        own_BT.astype(np.int32), np.take_along_axis(parents_BS, own_BT, axis=1).astype(np.int32)
    )


def _ours(q, k, v, g, segments, chosen=None, kernel="xla"):
    """Values and gradients with respect to q, k, v."""

    @jax.jit  # anew in every test: some change SCORE_BYTES
    def run(q, k, v, g, segments, chosen):
        out, vjp = jax.vjp(
            lambda q, k, v: packed_attention(q, k, v, segments, SCALE, chosen, kernel), q, k, v
        )
        return out, *vjp(g)

    return run(q, k, v, g, segments, chosen)


def _normal(rng, *shape, dtype=np.float32):
    return rng.normal(size=shape).astype(dtype)


@pytest.mark.parametrize(
    ("B", "T", "N", "K", "score_bytes", "kernel"),
    [
        (2, 150, 6, 2, None, "xla"),  # three blocks, the last one short
        (1, 600, 2, 1, None, "xla"),  # eight blocks, no longer of the least size
        (2, 100, 4, 2, 40_000, "xla"),  # every block's scores in slices
        (1, 600, 4, 2, None, "pallas_tpu"),  # 640 positions in five blocks
        (1, 100, 4, 2, None, "pallas_gpu"),
    ],
)
def test_packed_values_and_gradients_equal_a_plain_softmax(
    B, T, N, K, score_bytes, kernel, rng, monkeypatch
):
    H = 8
    if score_bytes is not None:
        monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
        counts = [
            attention._slices(jnp.zeros((B, K, N // K, min(64, T - start), H)), start + 64)
            for start in range(0, T, 64)
        ]
        assert min(counts) > 1
    q = _normal(rng, B, T, N, H) * 2
    k = _normal(rng, B, T, K, H)
    v = _normal(rng, B, T, K, H)
    g = _normal(rng, B, T, N, H)
    segments = _segments(rng, B, T)
    for ours, theirs in zip(
        _ours(q, k, v, g, segments, kernel=kernel), _torch(q, k, v, _allowed(*segments), SCALE, g)
    ):
        # float32 sums over up to 600 keys or queries
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("score_bytes", [None, 40_000])
def test_values_of_another_width_and_chosen_keys(score_bytes, rng, monkeypatch):
    B, T, N, K, H, V = 2, 100, 4, 2, 8, 5
    if score_bytes is not None:
        monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
    q = _normal(rng, B, T, N, H) * 2
    k = _normal(rng, B, T, K, H)
    v = _normal(rng, B, T, K, V)
    g = _normal(rng, B, T, N, V)
    segments = _segments(rng, B, T)
    chosen_BTT = rng.random((B, T, T)) < 0.5
    chosen_BTT[:, range(T), range(T)] = True  # a token sees something
    bits = attention.pack_keys(jnp.asarray(chosen_BTT))
    assert bits.shape == (B, T, 13)
    theirs = _torch(q, k, v, _allowed(*segments) & chosen_BTT, SCALE, g)
    for ours, want in zip(_ours(q, k, v, g, segments, bits), theirs):
        np.testing.assert_allclose(ours, want, atol=2e-5)  # as above
