"""Windows and sinks: the gradient of sinks, kernels of layers with a window, and the runs that it
reads.

Axes: B rows, T tokens, N heads, H head dim, D table entries.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.models import attention, paged, transformer
from mint_jax.models.attention import Segments
from mint_jax.models.config import Kernels
from pallas_kernels import dispatch
from tests.marks import first


@pytest.mark.parametrize("kernel", first(1, ["xla", "pallas_tpu", "pallas_gpu"]))
def test_gradients_of_sinks_are_those_of_a_softmax_with_one_more_key(rng, kernel):
    B, T, N, H, window = 2, 70, 4, 8, 9
    q, k, v, g = (rng.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(4))
    sinks, zeros = rng.normal(size=N).astype(np.float32), np.zeros((B, T), np.int32)
    position = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))

    def ours(*args):
        q, k, v, sinks = args
        segments = Segments(zeros, zeros)
        near = {"window": window, "positions_BT": position}
        out = attention.packed_attention(
            q, k, v, segments, 0.4, kernel=kernel, sinks_N=sinks, **near
        )
        return jnp.sum(out * g)

    def plain(*args):
        q, k, v, sinks = args
        s = 0.4 * jnp.einsum("btnh,bsnh->bnts", q, k)
        ago = np.arange(T)[:, None] - np.arange(T)[None]
        s = jnp.where(((ago >= 0) & (ago < window))[None, None], s, -jnp.inf)
        extra = jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))
        w = jax.nn.softmax(jnp.concatenate([s, extra], axis=-1), axis=-1)[..., :-1]
        return jnp.sum(jnp.einsum("bnts,bsnh->btnh", w, v) * g)

    args = q, k, v, sinks
    of_all = tuple(range(4))
    for got, want in zip(*(jax.jit(jax.grad(f, of_all))(*args) for f in (ours, plain))):
        # float32 sums of up to 140 terms
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max() + 1e-6)


@pytest.mark.parametrize("family", first(1, ["gemma3", "gpt_oss", "mistral"]))
def test_layers_with_a_window_have_a_kernel_too(family, tiny_base, rng):
    """A prompt and two rollouts; the second is far from the prompt in the row."""
    base, lengths = tiny_base(family), (30, 60, 20)
    own = np.repeat(np.arange(3, dtype=np.int32), lengths)[None]
    starts = (0, lengths[0], lengths[0])
    position = np.concatenate([at + np.arange(n) for at, n in zip(starts, lengths)])[None]
    tokens = rng.integers(3, base.cfg.vocab_size, own.shape).astype(np.int32)
    inputs = transformer.DecoderInputs(
        tokens, position.astype(np.int32), Segments(own, np.zeros_like(own))
    )

    def hidden(params, kernel):
        cfg = base.cfg.replace(kernels=Kernels(packed_attention=kernel))
        return transformer.hidden_states(params, None, inputs, cfg)[0]

    before = dispatch.fallen.copy()
    jax.eval_shape(functools.partial(hidden, kernel="auto"), base.params)
    skipped = dispatch.passed_over(before, "cuda")
    assert "packed_attention" not in [one["op"] for one in skipped], skipped
    # a named kernel that cannot serve a layer raises
    xla, kernel = (jax.jit(hidden, static_argnums=1)(base.params, n) for n in ("xla", "pallas_gpu"))
    # float32 sums in another order, after layers and a norm
    np.testing.assert_allclose(kernel, xla, rtol=0, atol=2e-5 * np.abs(xla).max())


def test_a_window_reads_its_own_runs_only():
    """At 5,000 cached positions: the runs of 128 that hold the window, and no more."""
    B, D = 3, 64 * paged.RUN_PAGES
    prefix, own = np.int32([5000, 4990, 3]), np.int32([0, 10, 4997])
    table, none = np.zeros((B, D), np.int32), np.zeros(B, np.int32)
    view = paged.View(table, prefix, own, none, none)
    for window, most in ((128, 3), (1000, 10)):
        near, edge = paged.within(view, window, prefix + own, 1)
        runs = paged.last_run(prefix, own) - near.first
        read = np.asarray(runs) + edge.run.shape[1]
        assert (read <= most).all(), (window, read)
        assert np.asarray(edge.visible).any()
