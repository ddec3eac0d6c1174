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
from pallas_kernels.packed_attention.segments import meeting, visits
from tests.marks import first

SCALE = 0.3


def arguments(rng, B, K, G, T, H, V, dtype="float32"):
    """q, k, v, own, parent, g: texts of any length, some the rollouts of an earlier one."""

    def normal(*shape):
        return jnp.array(rng.normal(size=shape), dtype)

    own = np.sort(rng.integers(0, 6, (B, T)), axis=1).astype(np.int32)
    before = np.maximum(np.arange(6) - rng.integers(0, 3, (B, 6)), 0).astype(np.int32)
    q, k, v, g = (normal(B, K, *rest) for rest in ((G, T, H), (T, H), (T, V), (G, T, V)))
    return q, k, v, own, np.take_along_axis(before, own, axis=1), g


def positions(own, parent):
    """A text goes on where its parent ends."""
    out = np.zeros_like(own)
    for row, segments in enumerate(zip(own, parent)):
        after = {}
        for t, (mine, before) in enumerate(zip(*segments)):
            out[row, t] = after.get(mine, after.get(before, 0))
            after[mine] = out[row, t] + 1
    return out


def both(q, k, v, own, parent, g, position=None, kernel=pallas_tpu, **how):
    args = q, k, v, own, parent, position
    out, lse = kernel.forward(*args, scale=SCALE, **how)
    return out, lse, *kernel.backward(*args, out, lse, g, scale=SCALE, **how)


def blocks_of_gpu(most, *sizes):
    return pallas_gpu.Config(most, *(pallas_gpu.Block(*one, warps=4, stages=2) for one in sizes))


SMALL_GPU = blocks_of_gpu(16, (64, 16), (16, 64), (32, 64))
KINDS = {
    "pallas_tpu": {"how": Config(block=256)},
    "pallas_gpu": {"kernel": pallas_gpu},
    "pallas_gpu small": {"kernel": pallas_gpu, "how": SMALL_GPU},
}
FORMS = {
    name: jax.jit(functools.partial(both, interpret=True, **how), static_argnames="window")
    for name, how in KINDS.items()
}


def wanted(q, k, v, own, parent, g, window=None):
    of, near = (q, k, v, own, parent, SCALE), (window, positions(own, parent))
    return *reference.attention(*of, *near), *reference.gradients(*of, g, *near)


# float32: sums of up to 400 terms in another order. bfloat16: scores' weights and gradients are
# rounded before they are multiplied.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def close(made, want, dtype):
    for ours, theirs in zip(made, want, strict=True):
        most = TOLERANCE[dtype] * max(1, np.abs(theirs).max())
        np.testing.assert_allclose(np.array(ours, np.float64), theirs, atol=most, rtol=0)


CASES = [
    # blocks of 128, the last with padding; values of another width
    (2, 2, 3, 300, 16, 24, "float32", None),
    # a window of more than a block and than some texts, one within a block, and the token alone
    (1, 1, 2, 400, 64, 64, "bfloat16", 150),
    (1, 2, 1, 17, 8, 8, "float32", 5),
    (2, 1, 2, 300, 16, 24, "float32", 20),
    (1, 2, 1, 17, 8, 8, "float32", 1),
    (1, 1, 2, 400, 64, 64, "bfloat16", None),
]


@pytest.mark.parametrize("case", first(3, CASES), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_float64(rng, case, form):
    *shape, window = case
    args = arguments(rng, *shape)
    made = FORMS[form](*args, positions(*args[3:5]), window=window)
    close(made, wanted(*args, window), shape[-1])


STRANGERS = {
    # four texts of a block each: the last sees the second; ranges of the others keep apart
    "segments": ([3, 0, 1, 2], [3, 0, 1, 0], None, slice(256, 384), [(0, 256), (384, 512)]),
    # a prompt of two blocks and two rollouts, whose windows reach into the second
    "window": ([0, 0, 1, 2], [0, 0, 0, 0], 100, slice(0, 128), [(256, 512)]),
}


@pytest.mark.parametrize("case", STRANGERS)
@pytest.mark.parametrize("form", ["pallas_tpu", "pallas_gpu"])
def test_blocks_of_strangers_are_passed_over_and_their_numbers_never_seen(rng, form, case):
    """Numbers that are not finite, in blocks of their own, change no bit of tokens that do not
    attend to them.
    """
    q, k, v, _, _, g = arguments(rng, 1, 1, 2, 512, 16, 16)
    *segments, window, bad, kept = STRANGERS[case]
    own, parent = (np.repeat(np.array(one, np.int32), 128)[None] for one in segments)
    how = {"how": Config(block=128)}
    if form == "pallas_gpu":
        block = blocks_of_gpu(32, (64, 32), (64, 128), (128, 64))
        how = {"kernel": pallas_gpu, "how": block}
    run = jax.jit(functools.partial(both, interpret=True, window=window, **how))
    at = positions(own, parent)
    clean = run(q, k, v, own, parent, g, at)
    values = zip((q, k, v), (np.nan, np.inf, np.nan))
    spoilt = run(*(x.at[..., bad, :].set(value) for x, value in values), own, parent, g, at)
    for x, y in zip(clean, spoilt, strict=True):
        axis = x.shape.index(512)
        for ends in kept:
            x_kept, y_kept = (np.take(np.array(one), np.arange(*ends), axis) for one in (x, y))
            assert np.isfinite(x_kept).all()
            assert x_kept.tobytes() == y_kept.tobytes()
    assert np.isnan(np.array(spoilt[0])[:, :, :, bad]).all()


def test_kernels_have_no_races_and_read_nothing_that_was_not_written(rng):
    """In the interpreter that keeps the device's memories and clocks, where scratch begins as
    NaN.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    args = arguments(rng, 1, 1, 2, 256, 16, 16)
    how = {"how": Config(block=128), "interpret": pltpu.InterpretParams(detect_races=True)}
    made = both(*args, positions(*args[3:5]), window=30, **how)
    assert not interpret_pallas_call.races.races_found
    for ours, theirs in zip(made, wanted(*args, 30), strict=True):
        most = TOLERANCE["float32"] * max(1, np.abs(theirs).max())
        np.testing.assert_allclose(np.array(ours, np.float64), theirs, atol=most, rtol=0)


def test_a_long_text_costs_its_length_times_the_window():
    """Also beside a short text, whose small positions are in a block with its last ones, and in
    rollouts of its, which visit its end.
    """
    T, size, window = 4096, 128, 200  # a block's queries reach over 327 keys, in at most 4 blocks
    one = np.zeros((1, T), np.int32)
    two = one + (np.arange(T) >= 4000)
    group = np.maximum(np.arange(T) - 1000, 0)[None] // 500  # a prompt of 1,500 and its rollouts
    for own, parent, most in ((one, one, 4), (two, two, 4), (group, one, 7)):
        of = [jnp.array(x, jnp.int32) for x in (own, parent, positions(own, parent))]
        meet = meeting(of, window, size, size)
        listed, counts = visits(meet)
        assert counts.max() <= most, (counts, own)
        assert counts.max() < 8 < visits(meeting(of[:2], None, size, size))[1].max()
        # the list has what is visible and ends with its last block
        mine, theirs, at = (np.array(x[0])[:, None] for x in of)
        seen = np.tri(T, dtype=bool) & (at - at.T < window)
        seen &= (mine == mine.T) | (theirs == mine.T)
        seen = seen.reshape(T // size, size, -1, size).any((1, 3))
        assert not (seen & ~np.array(meet[0])).any()
        for row, n, want in zip(np.array(listed[0]), np.array(counts[0]), np.array(meet[0])):
            assert row[:n].tolist() == np.flatnonzero(want).tolist()
            assert (row[n:] == row[n - 1]).all()


@pytest.mark.parametrize(("form", "window"), [("pallas_tpu", None), ("pallas_gpu", 12)])
def test_over_a_mesh_each_device_has_its_rows_and_heads(rng, mesh8, form, window):
    q, k, v, own, parent, g = arguments(rng, 4, 2, 2, 40, 16, 16)
    near = {"window": window, "positions_BT": positions(own, parent)}
    segments, weights = Segments(own, parent), np.moveaxis(np.array(g), 3, 1).reshape(4, 40, 4, 16)

    @functools.partial(jax.jit, static_argnames="kernel")
    def run(q, k, v, kernel):
        q, k, v = (sharding.constrain(x, "batch", None, "kv_heads", None) for x in (q, k, v))
        call = functools.partial(packed_attention, kernel=kernel, **near)
        out, vjp = jax.vjp(lambda *x: call(*x, segments, SCALE), q, k, v)
        return out, *vjp(weights)

    def in_rows(*all_):
        """Heads behind positions, and those of queries together."""
        return [np.moveaxis(np.array(x), -2, 1).reshape(4, 40, -1, 16) for x in all_]

    args, (out, _, *back) = in_rows(q, k, v), wanted(q, k, v, own, parent, g, window)
    theirs = in_rows(out, *back)
    with jax.set_mesh(mesh8):
        close(run(*args, kernel=form), theirs, "float32")
