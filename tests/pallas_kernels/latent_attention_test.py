"""Latent attention to a paged cache against float64, by XLA and by the kernels: isolation, races,
compilation ahead of time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, latent_attention
from pallas_kernels.latent_attention import pallas, reference, shapes, xla
from pallas_kernels.paged import pallas_gpu as paged_gpu
from pallas_kernels.paged import pallas_tpu as paged_tpu
from tests.marks import first
from tests.pallas_kernels import gpu, pages

SCALE = 0.15
SMALL = paged_tpu.Config(runs=2, slots=2, rows=8)
SMALL_GPU = paged_gpu.Config(queries=16, keys=64, most=32, parts=3, warps=4, stages=2)
FORMS = {
    "pallas_tpu": jax.jit(functools.partial(pallas.attend, paged_tpu, scale=SCALE, interpret=True)),
    "pallas_tpu small": jax.jit(
        functools.partial(pallas.attend, paged_tpu, scale=SCALE, how=SMALL, interpret=True)
    ),
    "pallas_gpu": jax.jit(functools.partial(pallas.attend, paged_gpu, scale=SCALE, interpret=True)),
    "pallas_gpu small": jax.jit(
        functools.partial(pallas.attend, paged_gpu, scale=SCALE, how=SMALL_GPU, interpret=True)
    ),
    "xla": jax.jit(functools.partial(xla.attend, scale=SCALE)),
}


def arguments(rng, B, M, C, J, L, dtype, **lengths):
    """Latents of C and rotary keys of J dimensions, in pools whose widths are multiples of 128."""
    rows, U = pages.random_rows(rng, B, L, **lengths)
    pools = (
        pages.random_pool(rng, rows, (L, U, pages.PAGE, -(-n // 128) * 128), n, dtype)
        for n in (C, J)
    )
    queries = (jnp.array(rng.normal(size=(B, M, n)), dtype) for n in (C, J))
    return *queries, *pools, rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case",
    first(
        1,
        [
            (6, 12, 256, 64, 2, "float32"),
            (4, 16, 128, 64, 1, "bfloat16"),
            (3, 5, 72, 8, 2, "float32"),
        ],
    ),
    ids=str,
)
def test_values_are_those_of_float64(rng, form, case):
    args = arguments(rng, *case)
    made, want = FORMS[form](*args), reference.latent_attention(*args, scale=SCALE)
    if form == "xla":  # see paged_attention_test
        made = [np.where(want[1] > 0, x, w) for x, w in zip(made, want)]
    pages.close(made, want, case[-1])


@pytest.mark.bits
@pytest.mark.parametrize("form", ["pallas_tpu small", "pallas_gpu small"])
def test_what_is_not_finite_stays_with_its_row(rng, form):
    lengths = {"prefix": [200, 40, 129, 0], "own": [31, 140, 1, 33], "first": [0] * 4}
    names = ("q_latent", "q_rope", "latent", "rope")
    *args, rows = arguments(rng, 4, 6, 128, 64, 2, "float32", **lengths)
    form = FORMS[form]
    clean = form(*args, rows)
    for value in (np.nan, np.inf, -np.inf):
        for n, name in enumerate(names):
            bad = int(rng.integers(4))
            place = (
                (bad, 3, 5) if name.startswith("q") else (rows.layer, int(rows.table[bad, 0]), 0, 5)
            )
            dirty = [x.at[place].set(value) if i == n else x for i, x in enumerate(args)]
            made = form(*dirty, rows)
            for one, other in zip(made, clean, strict=True):
                others = np.arange(4) != bad
                assert np.array(one)[others].tobytes() == np.array(other)[others].tobytes(), (
                    name,
                    value,
                )
            # An infinite rotary key may make a weight of 0, as in any softmax.
            assert (
                name == "rope" or not np.isfinite(np.array(made.value / made.total)[bad]).all()
            ), (name, value)


def test_the_kernel_has_no_races_and_reads_nothing_that_was_not_written(rng):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    args = arguments(
        rng,
        4,
        5,
        128,
        64,
        2,
        "float32",
        prefix=[200, 0, 0, 129],
        own=[129, 0, 31, 0],
        first=[0, 0, 0, 1],
    )
    made = pallas.attend(
        paged_tpu, *args, scale=SCALE, how=SMALL, interpret=pltpu.InterpretParams(detect_races=True)
    )
    pages.close(made, reference.latent_attention(*args, scale=SCALE), "float32")
    assert not interpret_pallas_call.races.races_found


def test_chosen_keys_are_left_to_xla(rng):
    """And are the only ones that are seen: two tokens of three heads."""
    *queries, latent, rope, rows = arguments(rng, 3, 6, 128, 64, 1, "float32")
    layer, table, prefix, own, first = rows
    chosen = rng.random((3, 2, table.shape[1] // 4, 128)) < 0.5
    args = *queries, latent, rope, rows
    assert dict(dispatch.explain(latent_attention.ATTEND, *args, chosen)) == {
        "pallas_tpu": "does not serve: an indexer chooses the keys",
        "pallas_gpu": "does not serve: an indexer chooses the keys",
        "xla": "serves on any platform",
    }
    made = latent_attention.latent_attention(*args, chosen, scale=SCALE)
    for b in range(3):
        for t in range(2):
            # The keys of one token, side by side as a row of their own.
            at = np.flatnonzero(
                pages.filled(int(prefix[b]), int(own[b]), np.arange(chosen[b, t].size))
                & chosen[b, t].reshape(-1)
            )
            at = at[at >= int(first[b]) * 128]
            page = np.asarray(table)[b, at // 32]
            keys = (
                np.array(x, np.float64)[int(layer), page, at % 32, :n]
                for x, n in ((latent, 128), (rope, 64))
            )
            q = np.concatenate(
                [np.array(x, np.float64)[b, 3 * t : 3 * t + 3] for x in queries], axis=1
            )
            values, positions = keys
            s = q @ np.concatenate([values, positions], axis=1).T * SCALE
            if len(at):
                w = np.exp(s - s.max(1, keepdims=True))
                mine = np.array(made.value / made.total)[b, 3 * t : 3 * t + 3]
                np.testing.assert_allclose(
                    mine, w / w.sum(1, keepdims=True) @ values, atol=pages.TOLERANCE["float32"]
                )


def test_a_gpu_of_little_shared_memory_leaves_latents_to_xla(monkeypatch):
    args = arrays(shapes.DECODE[0])
    for attached, serves in (("8.0", True), ("8.6", False), ("9.0", True)):
        gpu.attach(monkeypatch, attached)
        told = dict(dispatch.explain(latent_attention.ATTEND, *args))["pallas_gpu"]
        assert told == "serves on cuda" if serves else "8.6, whose 99 KiB" in told


def test_shapes_are_checked(rng):
    args = arguments(rng, 2, 3, 128, 64, 1, "float32")
    with pytest.raises(ValueError, match="queries have shapes"):
        latent_attention.latent_attention(
            args[0], args[1], args[2][..., :64], *args[3:], scale=SCALE
        )
    with pytest.raises(ValueError, match="D a multiple of 4"):
        latent_attention.latent_attention(
            *args[:4], args[4]._replace(table=args[4].table[:, :3]), scale=SCALE
        )


def arrays(shape: shapes.Shape):
    B, M, positions, C, J, width, dtype = shape
    queries = [jax.ShapeDtypeStruct((B, M, n), dtype) for n in (C, J)]
    pools = [jax.ShapeDtypeStruct((2, 4096, pages.PAGE, n), dtype) for n in (C, width)]
    return *queries, *pools, pages.of_rows(B, positions)
