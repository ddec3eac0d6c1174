"""Packed LoRA's GPU kernels: what only they serve, and what they are lowered to. Values and
isolation: ``packed_lora_test.py``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.aot.flops import traced_flops
from pallas_kernels import dispatch, packed_lora
from pallas_kernels.packed_lora import pallas_gpu, reference, shapes
from tests.pallas_kernels import gpu
from tests.pallas_kernels.packed_lora_test import FORMS, arguments, close


@pytest.mark.parametrize(
    "case", [(50, 96, (40, 7), 3, 9, "float32"), (150, 130, (100,), 12, 2, "bfloat16")], ids=str
)
def test_any_rank_and_any_width(rng, case):
    """With the blocks that it chooses by itself."""
    add, backward = (
        jax.jit(functools.partial(f, interpret=True)) for f in (pallas_gpu.add, pallas_gpu.backward)
    )
    x, a, b, onto, factor = arguments(rng, *case)
    close(add(x, a, b, onto, factor), reference.packed_lora(x, a, b, onto, factor), case[-1])
    dx, da, db = reference.gradients(x, a, b, onto, factor)
    close(backward(x, a, b, onto, x, factor), (dx + np.array(x, np.float64), da, db), case[-1])


def test_rows_and_gradients_keep_their_bits_wherever_others_lie(rng):
    """One adapter's 40 rows, in three tiles, among ever other rows of others."""
    add, backward = FORMS["pallas_gpu"]
    x, a, b, onto, _ = arguments(rng, 80, 128, (128, 64), 16, 5, "bfloat16")
    g, seen = [y[::-1] for y in onto], set()
    for before, behind in ((20, 20), (0, 3), (7, 0), (33, 1)):
        place = np.r_[40 : 40 + before, 0:40, 40 + before : 80]
        factor = jnp.array(
            np.r_[[1] * before, [3] * 40, [0] * behind, [-1] * (40 - before - behind)], jnp.int32
        )
        rows, old, new = x[place], [y[place] for y in onto], [y[place] for y in g]
        y, (dx, da, db) = (
            add(rows, a, b, old, factor),
            backward(rows, a, b, new, jnp.zeros_like(rows), factor),
        )
        mine = [*(one[before : before + 40] for one in (*y, dx)), *(one[3] for one in (*da, *db))]
        seen.add(b"".join(np.array(one).tobytes() for one in mine))
    assert len(seen) == 1


def specs(shape: shapes.Shape, backward: bool):
    def spec(*dims, dtype=shape.dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    M, D, W, R = shape.rows, shape.d_in, shape.factors, shape.rank
    wide = [spec(M, F) for F in shape.d_out]
    dx = [spec(M, D)] if backward else []
    return (
        spec(M, D),
        [spec(W, R, D) for _ in wide],
        [spec(W, R, F) for F in shape.d_out],
        wide,
        *dx,
        spec(M, dtype="int32"),
    )


ALL = [*shapes.DECODE, *shapes.TRAIN]
SOME = [shapes.DECODE[0], shapes.DECODE[-1], shapes.TRAIN[2]]


@pytest.mark.parametrize(
    "shape",
    [*SOME, *(pytest.param(s, marks=pytest.mark.long) for s in ALL if s not in SOME)],
    ids=str,
)
def test_for_a_gpu_it_is_its_kernels_alone(shape):
    """One forward; backward one for the rows, one for all A, one for each B; no product beside
    them, and rows are added to in place.
    """
    for table, backward in ((packed_lora.ADD, False), (packed_lora.BACKWARD, True)):
        args = specs(shape, backward)
        call = lambda *args, table=table: dispatch.run("packed_lora", table, "auto", args)  # noqa: E731
        text, K = gpu.text(call, *args), len(shape.d_out)
        assert text.count("__gpu$xla.gpu.triton") == (2 + K if backward else 1)
        assert text.count("output_operand_alias<") == (1 + 2 * K if backward else K)
        assert "stablehlo.dot" not in text
        assert "ragged_dot" not in text
        assert "__gpu$xla.gpu.triton" not in jax.jit(call).lower(*args).as_text()


def test_their_flops_are_counted():
    """A row's products forward: x A, h B; backward: x A, g B, dh A, and the outer products of dh
    and x, h and g.
    """
    shape = shapes.Shape(64, 32, (48, 80), 4, 2)
    one = 2 * 64 * 4
    for table, backward, flops in (
        (packed_lora.ADD, False, one * (64 + 128)),
        (packed_lora.BACKWARD, True, one * (6 * 32 + 2 * 128)),
    ):
        call = {one.name: one.call for one in table}["pallas_gpu"]
        assert traced_flops(jax.make_jaxpr(call)(*specs(shape, backward)).jaxpr) == flops


def test_it_says_what_it_does_not_serve():
    def told(shape, **other):
        args = (
            dict(zip(("x", "a", "b", "onto", "factor"), specs(shape, False), strict=True)) | other
        )
        return dict(dispatch.explain(packed_lora.ADD, *args.values()))["pallas_gpu"]

    small = shapes.Shape(16, 32, (32, 32), 4, 2)
    assert told(small) == "serves on cuda"
    assert told(small._replace(rank=257)) == "does not serve: rank 257 is above 256"
    assert told(small._replace(rows=0)) == "does not serve: no rows"
    assert told(small._replace(dtype="float16")).startswith("does not serve: rows are float16")
    other = [jax.ShapeDtypeStruct((2, 8, 32), "bfloat16")] * 2
    assert told(small, b=other) == "does not serve: projections of the same rows have several ranks"
    assert "neither bfloat16" in told(small, a=[jax.ShapeDtypeStruct((2, 4, 32), "float16")] * 2)
