"""Matrices in a checkpoint's blocks of 4 and 8 bits: ggml's own numbers bit for bit, products those
of the numbers in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pallas_kernels.layer_matmul import UNPACK, blocks

kinds = pytest.mark.parametrize("kind", list(blocks.KINDS))


def random_rows(rng, D, F, kind):
    """A checkpoint's bytes of a matrix with F outputs: any numbers, and scales from subnormal to
    large, of both signs.
    """
    row, scales = blocks.KINDS[kind]
    out = rng.integers(0, 256, (F, D // blocks.DEPTH, row), dtype=np.uint8)
    for i in range(scales):
        value = rng.normal(size=out.shape[:2]) * 10.0 ** rng.integers(-7, 3, out.shape[:2])
        out[..., 2 * i : 2 * i + 2] = value.astype(np.float16)[..., None].view(np.uint8)
    return out.reshape(F, -1)


def numbers(rows, kind):
    """The matrix ``[D, F]`` as ggml's own library has it."""
    return dequantize(rows, GGMLQuantizationType[kind]).T


def assert_same_bits(made, want):
    pair = (np.ascontiguousarray(x).view(np.int32) for x in (made, want))
    np.testing.assert_array_equal(*pair)


@kinds
@pytest.mark.parametrize("transposed", [False, True])
def test_unpacked_they_are_ggml_s_numbers_bit_for_bit(rng, kind, transposed):
    for D, F in ((32, 64), (96, 192)):
        rows = random_rows(rng, D, F, kind)
        want = numbers(rows, kind)
        want = want.T if transposed else want
        for one in UNPACK:
            call = jax.jit(functools.partial(one.call, transposed=transposed))
            assert_same_bits(call(blocks.pack(rows, kind)), want)
    assert blocks.matrix_shape(jnp.zeros(blocks.blocks_shape(96, 192, kind))) == (96, 192)


def test_columns_are_rows_of_the_table(rng):
    rows = random_rows(rng, 96, 256, "Q8_0")
    at = rng.integers(0, 256, (3, 5))
    made = jax.jit(blocks.columns)(jnp.array(blocks.pack(rows, "Q8_0")), at)
    assert_same_bits(made, numbers(rows, "Q8_0").T[at])
