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
from pallas_kernels.layer_matmul import blocks, cpu, layer_matmul, table, unpack, unpacking

kinds = pytest.mark.parametrize("kind", list(blocks.KINDS))


@jax.jit
def kernel(x, w, layer, rows=None):
    return cpu.matmul(x, (w,), layer, rows)[0]


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
