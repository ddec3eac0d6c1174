"""Attention of packed rows against float64, forward and backward; what is passed over, races, and
what compilers make of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mint_jax import sharding
from mint_jax.models.attention import Segments, packed_attention
from pallas_kernels.packed_attention import pallas_gpu, pallas_tpu, reference
from pallas_kernels.packed_attention.pallas_tpu import Config

SCALE = 0.3


def arguments(rng, B, K, G, T, H, V, dtype="float32"):
    """q, k, v, own, parent, g: texts of any length, some the rollouts of the one before."""

    def normal(*shape):
        return jnp.array(rng.normal(size=shape), dtype)

    own = np.sort(rng.integers(0, 6, (B, T)), axis=1).astype(np.int32)
    before = np.maximum(np.arange(6) - rng.integers(0, 2, (B, 6)), 0).astype(np.int32)
    q, k, v, g = (normal(B, K, *rest) for rest in ((G, T, H), (T, H), (T, V), (G, T, V)))
    return q, k, v, own, np.take_along_axis(before, own, axis=1), g


def both(q, k, v, own, parent, g, kernel=pallas_tpu, **how):
    out, lse = kernel.forward(q, k, v, own, parent, scale=SCALE, **how)
    return out, lse, *kernel.backward(q, k, v, own, parent, out, lse, g, scale=SCALE, **how)


def blocks_of_gpu(most, *sizes):
    return pallas_gpu.Config(most, *(pallas_gpu.Block(*one, warps=4, stages=2) for one in sizes))


SMALL_GPU = blocks_of_gpu(16, (64, 16), (16, 64), (32, 64))
FORMS = {
    "pallas_tpu": jax.jit(functools.partial(both, how=Config(block=256), interpret=True)),
    "pallas_gpu": jax.jit(functools.partial(both, kernel=pallas_gpu, interpret=True)),
    "pallas_gpu small": jax.jit(
        functools.partial(both, kernel=pallas_gpu, how=SMALL_GPU, interpret=True)
    ),
}


def wanted(q, k, v, own, parent, g):
    of = q, k, v, own, parent, SCALE
    return *reference.attention(*of), *reference.gradients(*of, g)


# float32: sums of up to 400 terms in another order. bfloat16: scores' weights and gradients are
# rounded before they are multiplied.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize(
    "shape",
    [
        # blocks of 128, the last with padding; values of another width
        (2, 2, 3, 300, 16, 24, "float32"),
        (1, 1, 2, 400, 64, 64, "bfloat16"),
        (1, 2, 1, 17, 8, 8, "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_float64(rng, shape, form):
    args = arguments(rng, *shape)
    for ours, theirs in zip(FORMS[form](*args), wanted(*args), strict=True):
        most = TOLERANCE[shape[-1]] * max(1, np.abs(theirs).max())
        np.testing.assert_allclose(np.array(ours, np.float64), theirs, atol=most, rtol=0)


@pytest.mark.parametrize("form", ["pallas_tpu", "pallas_gpu"])
def test_blocks_of_strangers_are_passed_over_and_their_numbers_never_seen(rng, form):
    """A text that is not finite, in blocks of its own, changes no bit of the others in its row."""
    q, k, v, _, _, g = arguments(rng, 1, 1, 2, 512, 16, 16)
    own = np.repeat(np.array([3, 0, 1, 2], np.int32), 128)[None]
    # the last sees the second; ranges of the others keep apart
    parent = np.repeat(np.array([3, 0, 1, 0], np.int32), 128)[None]
    block = blocks_of_gpu(32, (64, 32), (64, 128), (128, 64))
    how = {
        "pallas_tpu": {"how": Config(block=128)},
        "pallas_gpu": {"kernel": pallas_gpu, "how": block},
    }[form]
    run = jax.jit(functools.partial(both, interpret=True, **how))
    clean = run(q, k, v, own, parent, g)
    bad = slice(256, 384)
    values = zip((q, k, v), (np.nan, np.inf, np.nan))
    spoilt = run(*(x.at[..., bad, :].set(value) for x, value in values), own, parent, g)
    for x, y in zip(clean, spoilt, strict=True):
        axis = x.shape.index(512)
        for kept in (slice(0, 256), slice(384, 512)):
            at = (slice(None),) * axis + (kept,)
            assert np.array(x)[at].tobytes() == np.array(y)[at].tobytes()
    assert np.isnan(np.array(spoilt[0])[:, :, :, bad]).all()


def test_kernels_have_no_races_and_read_nothing_that_was_not_written(rng):
    """In the interpreter that keeps the device's memories and clocks, where scratch begins as
    NaN.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    args = arguments(rng, 1, 1, 2, 256, 16, 16)
    made = both(*args, how=Config(block=128), interpret=pltpu.InterpretParams(detect_races=True))
    assert not interpret_pallas_call.races.races_found
    for ours, theirs in zip(made, wanted(*args), strict=True):
        most = TOLERANCE["float32"] * max(1, np.abs(theirs).max())
        np.testing.assert_allclose(np.array(ours, np.float64), theirs, atol=most, rtol=0)


@pytest.mark.parametrize("form", ["pallas_tpu", "pallas_gpu"])
def test_over_a_mesh_each_device_has_its_rows_and_heads(rng, mesh8, form):
    q, k, v, own, parent, g = arguments(rng, 4, 2, 2, 40, 16, 16)
    segments, weights = Segments(own, parent), np.moveaxis(np.array(g), 3, 1).reshape(4, 40, 4, 16)

    @functools.partial(jax.jit, static_argnames="kernel")
    def run(q, k, v, kernel):
        q, k, v = (sharding.constrain(x, "batch", None, "kv_heads", None) for x in (q, k, v))
        out, vjp = jax.vjp(lambda *x: packed_attention(*x, segments, SCALE, kernel=kernel), q, k, v)
        return out, *vjp(weights)

    def in_rows(*all_):
        """Heads behind positions, and those of queries together."""
        return [np.moveaxis(np.array(x), -2, 1).reshape(4, 40, -1, 16) for x in all_]

    args, (out, _, *back) = in_rows(q, k, v), wanted(q, k, v, own, parent, g)
    theirs = in_rows(out, *back)
    with jax.set_mesh(mesh8):
        for ours, want in zip(run(*args, kernel=form), theirs, strict=True):
            np.testing.assert_allclose(ours, want, atol=1e-5 * max(1, np.abs(want).max()), rtol=0)
