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

from pallas_kernels import dispatch
from pallas_kernels.layer_matmul import blocks, cpu, layer_matmul, table, unpack, unpacking, xla

SHAPES = [
    (1, 64, 64),
    (2, 96, 192),
    (3, 32, 128),
    (5, 576, 64),
    (8, 160, 320),
    (12, 64, 128),
    (33, 96, 64),
]
kinds = pytest.mark.parametrize("kind", list(blocks.KINDS))


@jax.jit
def kernel(x, w, layer, rows=None):
    return cpu.matmul(x, (w,), layer, rows)[0]


@jax.jit
def dense(x, w, layer):
    return cpu.matmul(x, (w,), layer)[0]


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


def stack(rng, D, F, kind, L=3):
    """Blocks ``[L, P, N, bytes]`` and the same in float32."""
    rows = [random_rows(rng, D, F, kind) for _ in range(L)]
    return jnp.array(np.stack([blocks.pack(one, kind) for one in rows])), jnp.array(
        np.stack([numbers(one, kind) for one in rows])
    )


@kinds
@pytest.mark.parametrize("transposed", [False, True])
def test_unpacked_they_are_ggml_s_numbers_bit_for_bit(rng, kind, transposed):
    for D, F in ((32, 64), (96, 192)):
        rows = random_rows(rng, D, F, kind)
        want = numbers(rows, kind)
        want = want.T if transposed else want
        for one in unpacking(transposed):
            made = jax.jit(one.call)(blocks.pack(rows, kind))
            np.testing.assert_array_equal(
                np.array(made).view(np.int32),
                np.ascontiguousarray(want).view(np.int32),
                err_msg=one.name,
            )
    assert blocks.matrix_shape(jnp.zeros(blocks.blocks_shape(96, 192, kind))) == (96, 192)


@kinds
def test_every_number_and_every_scale_is_what_its_type_says(rng, kind):
    """All 65,536 scales, subnormal and not finite ones too, each with every number of 4 bits, or 32
    of those of 8.
    """
    row, scales = blocks.KINDS[kind]
    for first in range(0, 1 << 16, 1 << 13):
        out = np.zeros((1 << 13, 1, row), np.uint8)
        out[..., :2] = np.arange(first, first + (1 << 13), dtype=np.uint16)[:, None].view(np.uint8)[
            :, None
        ]
        if scales > 1:
            out[..., 2:4] = (
                rng.permutation(1 << 16)[: 1 << 13]
                .astype(np.uint16)[:, None]
                .view(np.uint8)[:, None]
            )
            out[..., 4:] = rng.permutation(16) | rng.permutation(16) << 4
        else:
            out[..., 2:] = rng.permutation(256)[:32]
        with np.errstate(invalid="ignore", over="ignore"):
            want = numbers(out.reshape(1 << 13, -1), kind)
        made = jax.jit(blocks.unpack_by_cpu)(blocks.pack(out.reshape(1 << 13, -1), kind))
        np.testing.assert_array_equal(made, want)  # NaN where it has NaN


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_float64_and_have_the_bits_of_float32_s(rng, kind, shape):
    M, D, F = shape
    w, full = stack(rng, D, F, kind)
    x, layer = jnp.array(rng.normal(size=(M, D)), jnp.float32), jnp.int32(rng.integers(3))
    want = np.array(x, np.float64) @ np.array(full[layer], np.float64)
    near = np.abs(np.array(x, np.float64)) @ np.abs(np.array(full[layer], np.float64))
    made = kernel(x, w, layer)
    # As for float32's kernel: each addition is off by at most 6e-8 of the sums of magnitudes so
    # far.
    for one in (made, jax.jit(xla.matmul)(x, (w,), layer)[0]):
        assert (np.abs(one - want) <= 6e-8 * D**0.5 * 8 * near).all()
    assert np.array(made).tobytes() == np.array(dense(x, full, layer)).tobytes()


@kinds
def test_a_row_s_bits_do_not_depend_on_how_many_rows_there_are(rng, kind):
    w, _ = stack(rng, 96, 192, kind)
    x, layer = jnp.array(rng.normal(size=(50, 96)), jnp.float32), jnp.int32(1)
    all_ = np.array(kernel(x, w, layer))
    for M in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 31):
        at = rng.permutation(50)[:M]
        assert np.array(kernel(x[at], w, layer)).tobytes() == all_[at].tobytes(), M
    for rows in (0, 1, 5, 8, 9, 49, 50, 51, -1):
        live = min(max(rows, 0), 50)
        # which nobody reads
        made = np.array(kernel(x.at[live:].set(np.nan), w, layer, jnp.int32(rows)))
        assert made[:live].tobytes() == all_[:live].tobytes(), rows
        assert (made[live:] == 0).all(), rows


@kinds
@pytest.mark.parametrize("M", [1, 4, 8, 20])
def test_what_is_not_finite_stays_in_its_row_and_column(rng, kind, M):
    rows = random_rows(rng, 64, 128, kind)
    x, row, column = (
        jnp.array(rng.normal(size=(M, 64)), jnp.float32),
        int(rng.integers(M)),
        int(rng.integers(128)),
    )

    def product(x, rows):
        return np.array(kernel(x, blocks.pack(rows, kind)[None], jnp.int32(0)))

    clean, others = product(x, rows), np.arange(M) != row
    for value in (np.nan, np.inf, -np.inf):
        made = product(x.at[row, 3].set(value), rows)
        assert not np.isfinite(made[row]).all()
        assert made[others].tobytes() == clean[others].tobytes()
        hurt = rows.copy()
        hurt[column, :2] = np.array([value], np.float16).view(np.uint8)
        made = product(x, hurt)
        assert not np.isfinite(made[:, column]).any()
        assert np.delete(made, column, 1).tobytes() == np.delete(clean, column, 1).tobytes()


@kinds
@pytest.mark.parametrize("M", [1, 8, 20])
def test_matrices_of_the_same_rows_are_one_call_with_the_bits_of_each_alone(rng, kind, M):
    x, layer = jnp.array(rng.normal(size=(M, 96)), jnp.float32), jnp.int32(2)
    stacks = tuple(stack(rng, 96, F, kind)[0] for F in (64, 192, 128))
    made = layer_matmul(x, stacks, layer, implementation="cpu")
    assert [y.shape for y in made] == [(M, 64), (M, 192), (M, 128)]
    for y, w in zip(made, stacks):
        assert np.array(y).tobytes() == np.array(kernel(x, w, layer)).tobytes()


def test_columns_are_rows_of_the_table(rng):
    rows = random_rows(rng, 96, 256, "Q8_0")
    at = rng.integers(0, 256, (3, 5))
    made = jax.jit(blocks.columns)(jnp.array(blocks.pack(rows, "Q8_0")), at)
    np.testing.assert_array_equal(
        np.array(made).view(np.int32),
        np.ascontiguousarray(numbers(rows, "Q8_0").T[at]).view(np.int32),
    )


@pytest.mark.bits
def test_auto_is_the_kernel_on_one_cpu_and_xla_elsewhere(rng):
    w, _ = stack(rng, 64, 64, "Q4_1")
    args = jnp.ones((2, 64)), (w,), jnp.int32(1)
    assert "mint_block_matmul" in jax.jit(layer_matmul).lower(*args).as_text()
    assert (
        "mint_block"
        not in jax.jit(layer_matmul).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    )
    assert "mint_block_unpack" in jax.jit(unpack).lower(w[0]).as_text()
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        assert "divides rows" in dict(dispatch.explain(table(False), *args))["cpu"]
        assert "divides rows" in dict(dispatch.explain(unpacking(False), w[0]))["cpu"]
        assert (
            "mint_block"
            not in jax.jit(lambda *args: (layer_matmul(*args), unpack(args[1][0][0])))
            .lower(*args)
            .as_text()
        )


def test_shapes_that_do_not_fit_are_refused(rng):
    (four, _), (eight, _), layer = (
        stack(rng, 64, 64, "Q4_1"),
        stack(rng, 64, 64, "Q8_0"),
        jnp.int32(0),
    )
    with pytest.raises(ValueError, match=r"w \(3, 64, 64\)"):
        layer_matmul(jnp.ones((2, 96)), (four,), layer)
    with pytest.raises(ValueError, match="expected"):
        layer_matmul(jnp.ones((2, 64)), (four,), layer, transposed=True)
    with pytest.raises(
        ValueError, match="blocks of two kinds are not one call; choose auto or one of: xla"
    ):
        layer_matmul(jnp.ones((2, 64)), (four, eight), layer, implementation="cpu")
    made = layer_matmul(jnp.ones((2, 64)), (four, eight), layer)  # by XLA, which takes them in turn
    for y, w in zip(made, (four, eight)):
        np.testing.assert_allclose(
            y, functools.partial(kernel, jnp.ones((2, 64)))(w, layer), rtol=1e-5, atol=1e-3
        )
    assert not blocks.fit(48, 64)
    assert not blocks.fit(64, 96)
