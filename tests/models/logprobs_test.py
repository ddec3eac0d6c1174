"""Log-probabilities of targets: values and gradients against torch's log_softmax in float64, whole
and in slices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax.models import logprobs, stored
from mint_jax.models.logprobs import logprobs_and_entropy
from pallas_kernels.layer_matmul import blocks
from tests.views import view_of

B, M, D, V = 4, 5, 16, 50


@pytest.fixture(params=[None, 2], ids=lambda n: f"slices-of-{n or 'all'}")
def slice_positions(request, monkeypatch):
    """How many positions' logits fit into a slice; of 5 positions in all, so that the last slice is
    padded.
    """
    if request.param is not None:
        monkeypatch.setattr(logprobs, "SLICE_BYTES", request.param * B * V * 4)
        assert logprobs._slice_count(B, M, V) == -(-M // request.param)
    return request.param


def _with_gradients(fn, leaves, g):
    """``fn(*leaves)`` and its gradients, compiled as one program."""

    @jax.jit
    def run(leaves, g):
        out, vjp = jax.vjp(fn, *leaves)
        return out, vjp(g)

    return run(leaves, g)


@pytest.mark.parametrize(
    ("K", "adapted", "warm", "cap"),
    [(0, False, False, None), (0, True, False, 5.0), (3, False, True, 5.0), (3, True, True, None)],
)
def test_values_and_gradients_equal_torch(K, adapted, warm, cap, slice_positions, rng):
    """Soft targets: one may stand twice, and their weights may be zero or negative."""
    h_BMD, table_VD = (rng.normal(size=s).astype(np.float32) for s in ((B, M, D), (V, D)))
    params = {"embed": {"w": jnp.asarray(table_VD)}}
    shape = (B, M, K) if K else (B, M)
    targets = rng.integers(V, size=shape).astype(np.int32)
    targets[0, 0] = 7
    g = (rng.normal(size=shape) * (rng.random(shape) < 0.7)).astype(np.float32)
    of_entropy = rng.normal(size=(B, M)).astype(np.float32)
    sharp = rng.uniform(0.3, 2.0, (B, M)).astype(np.float32) if warm else None
    a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((1, 1, 2, D), (1, 1, 2, V)))

    def mine(h, a, b):
        lora = view_of([({"unembed": {"a": a, "b": b}}, jnp.ones((1,)))]) if adapted else None
        return logprobs_and_entropy(params, lora, h, targets, sharp, cap, True)

    (got, entropy), gradients = _with_gradients(mine, [h_BMD, a, b], (g, of_entropy))
    leaves = [
        torch.tensor(np.asarray(leaf, np.float64), requires_grad=True) for leaf in (h_BMD, a, b)
    ]
    h, a_, b_ = leaves
    logits = h @ torch.tensor(table_VD, dtype=torch.float64).T + (
        (h @ a_[0, 0].T) @ b_[0, 0] if adapted else 0
    )
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits * (torch.tensor(np.float64(sharp))[..., None] if warm else 1.0)
    chosen = torch.tensor(targets, dtype=torch.long).reshape(B, M, -1)
    logp = torch.log_softmax(logits, -1)
    want, h_want = logp.gather(-1, chosen).reshape(shape), -(logp.exp() * logp).sum(-1)
    ((want * torch.tensor(g)).sum() + (h_want * torch.tensor(of_entropy)).sum()).backward()
    # float32 sums over 50 logits of size 10, and twice that where sharp
    np.testing.assert_allclose(got, want.detach(), atol=5e-5)
    np.testing.assert_allclose(entropy, h_want.detach(), atol=5e-5)
    for ours, leaf in zip(gradients, leaves):
        expected = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        np.testing.assert_allclose(ours, expected, atol=1e-4 * max(1.0, np.abs(expected).max()))
    # without a gradient
    np.testing.assert_allclose(mine(h_BMD, a, b)[0], want.detach(), atol=5e-5)


@pytest.mark.parametrize("K", [0, 3])
def test_a_slices_logits_are_in_memory_once(K):
    """Exponentials take their memory; it was twice as much while what is picked of the logits was
    read after them.
    """
    rows, positions, V, D = 8, 64, 40_000, 64
    slices = logprobs._slice_count(rows, positions, V)
    assert slices > 1

    def summed(h, table, targets, sharp):
        return logprobs_and_entropy({"embed": {"w": table}}, None, h, targets, sharp)[0].sum()

    spec = jax.ShapeDtypeStruct
    h = spec((rows, positions, D), np.float32)
    table = spec((V, D), np.float32)
    sharp = spec((rows, positions), np.float32)
    targets = spec((rows, positions, *[K] * (K > 0)), np.int32)
    for fn in (summed, jax.value_and_grad(summed)):
        compiled = jax.jit(fn).lower(h, table, targets, sharp).compile()
        assert (
            compiled.memory_analysis().temp_size_in_bytes
            < 1.3 * rows * (positions // slices) * V * 4
        )


def _held_in_blocks(rng, V, D):
    """A table in 8 bits with entries of size 1."""
    scales = rng.uniform(0.5, 2, (V, D // 32, 1)).astype(np.float16) / 127
    numbers = rng.integers(-127, 128, (V, D // 32, 32)).astype(np.int8)
    rows = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], axis=-1).reshape(V, -1)
    return jnp.asarray(blocks.pack(rows, "Q8_0"))


@pytest.mark.parametrize("hot", [False, True], ids=["plain", "temperatures"])
@pytest.mark.parametrize(
    ("many", "sliced"), [(None, False), (3, False), (None, True)], ids=["one", "many", "slices"]
)
@pytest.mark.parametrize(("kind", "V"), [("Q8_0", 192), ("Q8_0", 128), ("bfloat16", 150)])
def test_a_table_held_in_fewer_bits_comes_in_parts(kind, V, many, sliced, hot, rng, monkeypatch):
    """With a rest and without one; no array of the program is as large as the table or the
    logits.
    """
    D = 32
    monkeypatch.setattr(logprobs, "PART_BYTES", 1)  # 64 rows
    if sliced:
        monkeypatch.setattr(logprobs, "SLICE_BYTES", 2 * B * 64 * 4)
    held = (
        _held_in_blocks(rng, V, D)
        if kind == "Q8_0"
        else jnp.asarray(rng.normal(size=(V, D)), jnp.bfloat16)
    )
    table_VD = np.asarray(stored.table(held, jnp.float32), np.float64)
    h_BMD = rng.normal(size=(B, M, D)).astype(np.float32)
    # logits of +-1000: an exponential that forgets an earlier part's maximum overflows
    h_BMD[0, 0] *= 300
    shape = (B, M) if many is None else (B, M, many)
    y, g = rng.integers(V, size=shape).astype(np.int32), rng.normal(size=shape).astype(np.float32)
    temperatures = (
        rng.choice(np.float32([0.3, 1.0, 2.5]), (B, M)) if hot else np.ones((B, M), np.float32)
    )
    sharp = jnp.asarray(1 / temperatures) if hot else None
    program = jax.jit(
        lambda h, g, w: jax.vjp(
            lambda h: logprobs_and_entropy({"embed": {"w": w}}, None, h, y, sharp)[0], h
        )[1](g)
    )
    of_entropy = rng.normal(size=(B, M)).astype(np.float32)
    (out, entropy), (mine,) = _with_gradients(
        lambda h: logprobs_and_entropy({"embed": {"w": held}}, None, h, y, sharp, None, True),
        [h_BMD],
        (g, of_entropy),
    )
    plain, _ = jax.jit(lambda h: logprobs_and_entropy({"embed": {"w": held}}, None, h, y, sharp))(
        h_BMD
    )
    h = torch.tensor(np.float64(h_BMD), requires_grad=True)
    z = h @ torch.tensor(table_VD).T / torch.tensor(np.float64(temperatures))[..., None]
    logp = torch.log_softmax(z, -1)
    want = logp.gather(-1, torch.tensor(y, dtype=torch.long).reshape(B, M, -1)).reshape(shape)
    h_want = -(logp.exp() * logp).sum(-1)
    of_both = torch.tensor(np.float64(g)), torch.tensor(np.float64(of_entropy))
    (dh,) = torch.autograd.grad((want, h_want), h, of_both)
    # float32 sums, of logits of one position up to 10,000
    size = np.float64(z.detach().abs().amax(-1)).reshape(B, M, *(1,) * (len(shape) - 2))
    for values in (out, plain):
        assert (np.abs(values - np.float64(want.detach())) <= 2e-4 + 2e-6 * size).all()
    np.testing.assert_allclose(entropy, h_want.detach(), atol=2e-4)
    np.testing.assert_allclose(mine[:, 1:], dh[:, 1:], atol=2e-4 * (many or 1))
    np.testing.assert_allclose(mine[1:], dh[1:], atol=2e-4 * (many or 1))
    assert np.isfinite(mine).all()
    text = program.lower(h_BMD, g, held).as_text()
    assert f"{V}x{D}xf32" not in text
    assert f"x{V}xf32" not in text
