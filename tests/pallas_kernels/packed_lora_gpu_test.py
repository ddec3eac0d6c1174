"""Packed LoRA's GPU kernels: what only they serve, and what they are lowered to. Values and
isolation: ``packed_lora_test.py``.
"""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import dispatch, packed_lora
from pallas_kernels.packed_lora import pallas_gpu, reference, shapes
from tests.pallas_kernels.packed_lora_test import arguments, close


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
