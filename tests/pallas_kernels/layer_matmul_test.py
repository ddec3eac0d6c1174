"""A layer's matrix read from the stack by the kernel for CPUs: float64, bits, what is not finite,
and where XLA's form serves instead.
"""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.layer_matmul import (
    MATMUL,
    blocks,
    cpu,
    layer_matmul,
    pallas_gpu,
    reference,
    xla,
)
from tests.pallas_kernels.blocks_test import random_rows

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
# panels whole and cut, few and many rows
SHAPES = [(1, 576, 192), (8, 192, 576), (7, 33, 129), (13, 100, 64), (40, 64, 203), (3, 5, 7)]


@functools.partial(jax.jit, static_argnames="transposed")
def kernel(x, w, layer, rows=None, transposed=False):
    return cpu.matmul(x, (w,), layer, rows, transposed)[0]


@functools.partial(jax.jit, static_argnames="transposed")
def by_xla(x, w, layer, transposed=False):
    return xla.matmul(x, (w,), layer, transposed=transposed)[0]


KINDS = [*((stored, False) for stored in (*DTYPES, *blocks.KINDS))]
KINDS += [("float32", True), ("bfloat16", True)]
kinds = pytest.mark.parametrize(("dtype", "transposed"), KINDS)


def arguments(rng, M, D, F, dtype="float32", L=3, transposed=False):
    """Rows, a stack of matrices (in blocks: of the next whole numbers of blocks), a layer."""
    layer = jnp.int32(rng.integers(L))
    if dtype in blocks.KINDS:
        D, F = -(-D // blocks.DEPTH) * blocks.DEPTH, -(-F // blocks.COLUMNS) * blocks.COLUMNS
        rows = [random_rows(rng, D, F, dtype) for _ in range(L)]
        w = jnp.array(np.stack([blocks.pack(one, dtype) for one in rows]))
        return jnp.array(rng.normal(size=(M, D)), jnp.float32), w, layer
    x, shape = jnp.array(rng.normal(size=(M, D)), jnp.float32), (L, D, F)
    shape = (L, F, D) if transposed else shape
    w = rng.integers(-127, 128, shape) if dtype == "int8" else rng.normal(size=shape)
    return x, jnp.array(w, jnp.dtype(dtype)), layer


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_those_of_float64(rng, dtype, shape, transposed):
    x, w, layer = arguments(rng, *shape, dtype, transposed=transposed)
    want, near = reference.layer_matmul(x, w, layer, transposed)
    # A sum of D float32 products in order: each addition is off by at most 6e-8 of the sums of
    # magnitudes so far.
    for form in (kernel, by_xla):
        off = np.abs(form(x, w, layer, transposed=transposed) - want)
        assert (off <= 6e-8 * x.shape[1] ** 0.5 * 8 * near).all()
    if blocks.is_packed(w):
        of_float32 = kernel(x, blocks.unpack(w[layer])[None], jnp.int32(0))
        assert np.array(kernel(x, w, layer)).tobytes() == np.array(of_float32).tobytes()


@kinds
def test_a_row_s_bits_do_not_depend_on_how_many_rows_there_are(rng, dtype, transposed):
    x, w, layer = arguments(rng, 50, 96, 201, dtype, transposed=transposed)
    all_ = np.array(kernel(x, w, layer, transposed=transposed))
    for M in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 31):
        at = rng.permutation(50)[:M]
        some = np.array(kernel(x[at], w, layer, transposed=transposed))
        assert some.tobytes() == all_[at].tobytes(), M


@kinds
def test_rows_that_are_not_in_use_cost_nothing_and_get_zeros(rng, dtype, transposed):
    x, w, layer = arguments(rng, 40, 96, 201, dtype, transposed=transposed)
    all_ = np.array(kernel(x, w, layer, transposed=transposed))
    for rows in (0, 1, 5, 8, 9, 39, 40, 41, -1):
        live = min(max(rows, 0), 40)
        dead = x.at[live:].set(np.nan)  # which nobody reads
        made = np.array(kernel(dead, w, layer, jnp.int32(rows), transposed=transposed))
        assert made[:live].tobytes() == all_[:live].tobytes(), rows
        assert (made[live:] == 0).all(), rows


@pytest.mark.bits
def test_auto_is_the_kernel_on_one_cpu_and_xla_over_a_mesh(rng):
    x, w, layer = arguments(rng, 4, 32, 48)
    args = x, (w,), layer
    auto = jax.jit(layer_matmul)
    np.testing.assert_array_equal(auto(*args)[0], kernel(x, w, layer))
    assert "mint_layer_matmul" in auto.lower(*args).as_text()
    assert "mint_layer_matmul" not in auto.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        told = dict(dispatch.explain(MATMUL, *args))
        assert "divides rows" in told["cpu"]
        assert "mint_layer_matmul" not in jax.jit(layer_matmul).lower(*args).as_text()


def test_without_a_compiler_xla_serves_and_the_reason_is_told(tmp_path):
    """In a process of its own, for the kernels are loaded once."""
    code = """
import jax, jax.numpy as jnp
from pallas_kernels import dispatch
from pallas_kernels.layer_matmul import MATMUL, layer_matmul
args = jnp.ones((2, 4)), (jnp.ones((1, 4, 8)),), jnp.int32(0)
print(dict(dispatch.explain(MATMUL, *args))["cpu"])
print(float(layer_matmul(*args)[0][0, 0]), [fall.implementation for fall in dispatch.fallen if fall.platform == "cpu"])
try:
    layer_matmul(*args, implementation="cpu")
except ValueError as error:
    print(error)
"""  # noqa: E501
    alone = dict.fromkeys(("PATH", "MINT_JAX_CACHE"), str(tmp_path))
    alone |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    how = {"env": alone, "capture_output": True, "text": True, "check": True}
    told = subprocess.run([sys.executable, "-c", code], **how).stdout.splitlines()
    assert "install g++ or clang++" in told[0]
    assert told[1] == "4.0 ['cpu']"
    assert "choose auto or one of: xla" in told[2]


# GPUs.


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("shape", [(1, 576, 192), (40, 700, 203), (130, 64, 129)], ids=str)
def test_a_gpus_kernel_gives_what_float64_gives(rng, dtype, shape, transposed):
    """Parts that divide the depth and parts that do not, tiles and blocks that reach beyond; rows
    and products of bfloat16 are exact.
    """
    x, w, layer = arguments(rng, *shape, dtype, transposed=transposed)
    x = x.astype(jnp.bfloat16)
    want, near = reference.layer_matmul(x, w, layer, transposed)
    for how in (None, pallas_gpu.Config(16, 32, 64, 3, 4)):
        made = pallas_gpu.matmul(x, (w,), layer, None, transposed, how, interpret=True)[0]
        assert (np.abs(made - want) <= 6e-8 * shape[1] ** 0.5 * 8 * near).all()
