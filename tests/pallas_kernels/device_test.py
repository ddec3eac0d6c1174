"""The kernels as an accelerator's compiler makes them, on the accelerator, against float64: ``make
test-device``.

On a machine that has none ``make test-long`` interprets both kinds of kernels here, fewer cases of
small sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.models.attention import Segments, packed_attention
from pallas_kernels import (
    grouped_matmul,
    latent_attention,
    layer_matmul,
    packed_lora,
    packed_matmul,
    paged_attention,
    slot_lora,
)
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.latent_attention import reference as latent_reference
from pallas_kernels.layer_matmul import reference as layer_reference
from pallas_kernels.packed_attention import reference as attention_reference
from pallas_kernels.packed_lora import reference
from pallas_kernels.packed_matmul import reference as matmul_reference
from pallas_kernels.paged_attention import reference as paged_reference
from pallas_kernels.slot_lora import reference as slot_reference
from tests.pallas_kernels import (
    grouped_matmul_test,
    layer_matmul_test,
    packed_attention_test,
    packed_lora_test,
    packed_matmul_test,
    paged_test,
    slot_lora_test,
)
from tests.train import kernels_test

DEVICE = jax.default_backend()
KERNELS = {"tpu": ("pallas_tpu",), "gpu": ("pallas_gpu",)}.get(DEVICE, ("pallas_tpu", "pallas_gpu"))
SMALL = DEVICE == "cpu"
CALLS = {"pallas_tpu": "tpu_custom_call", "pallas_gpu": "__gpu$xla.gpu.triton"}
DTYPES = ("float32",) if SMALL else ("float32", "bfloat16")

pytestmark = {"tpu": pytest.mark.tpu, "gpu": pytest.mark.gpu}.get(DEVICE, pytest.mark.long)
calls = kernels_test.calls  # a fixture


@pytest.fixture(autouse=True)
def exact():
    """Products beside the kernels, too, are of float32; by default a TPU's are of bfloat16 and a
    GPU's of TF32.
    """
    with jax.default_matmul_precision("highest"):
        yield


def of(small, large):
    return small if SMALL else large


def run(kernel: str, call, *args):
    """The call's result, with the kernel in the program."""
    compiled = jax.jit(functools.partial(call, implementation=kernel)).lower(*args).compile()
    assert SMALL or CALLS[kernel] in compiled.as_text(), "the kernel, and nothing in its place"
    return compiled(*args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [16] if SMALL else [1, 16, 24, 64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_lora_and_its_gradients_are_those_of_float64(rng, kernel, rank, dtype):
    """Of runs of any length, one projection and two; in bfloat16 an even number of factors, as of
    all real experts.
    """
    for widths in ((256,), (128, 384)):
        M, D, W = of((70, 128, 10), (3000, 1024, 200))
        x, a, b, onto, factor = packed_lora_test.arguments(rng, M, D, widths, rank, W, dtype)
        g = tuple(jnp.array(rng.normal(size=y.shape), y.dtype) for y in onto)

        def both(x, a, b, onto, factor, g, implementation):
            out = packed_lora.packed_lora(x, a, b, onto, factor, implementation)
            zeros = jnp.zeros_like(x)
            return out, packed_lora.gradients(x, a, b, g, zeros, factor, implementation)

        out, grads = run(kernel, both, x, a, b, onto, factor, g)
        packed_lora_test.close(out, reference.packed_lora(x, a, b, onto, factor), dtype)
        packed_lora_test.close(grads, reference.gradients(x, a, b, g, factor), dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite_stays_with_its_adapter(rng, kernel):
    """In factors, rows and cotangents: every other row and gradient keeps its bits."""
    M, D, W = of((90, 128, 24), (1000, 512, 64))
    x, a, b, onto, _ = packed_lora_test.arguments(rng, M, D, (128, 256), 16, W, "float32")
    factor = jnp.array(np.sort(rng.integers(0, W, M)), jnp.int32)
    g = tuple(jnp.array(rng.normal(size=y.shape), y.dtype) for y in onto)

    @jax.jit
    def both(x, a, b, g):
        out = packed_lora.packed_lora(x, a, b, onto, factor, kernel)
        zeros = jnp.zeros_like(x)
        return jax.tree.leaves((out, packed_lora.gradients(x, a, b, g, zeros, factor, kernel)))

    clean = [np.array(y) for y in both(x, a, b, g)]
    row = int(rng.integers(M))
    bad = int(factor[row])
    mine = np.array(factor) == bad
    for value in (np.nan, np.inf, -np.inf):
        spoilt = {
            "x": (x.at[row, 3].set(value), a, b, g),
            "a": (x, [a[0].at[bad, 2, 5].set(value), a[1]], b, g),
            "b": (x, a, [b[0], b[1].at[bad, 7, 100].set(value)], g),
            "g": (x, a, b, (g[0].at[row, 9].set(value), g[1])),
        }
        for where, args in spoilt.items():
            reached = False
            for one, other in zip(map(np.array, both(*args)), clean, strict=True):
                others = ~mine if len(one) == M else np.arange(W) != bad
                assert one[others].tobytes() == other[others].tobytes(), (where, value)
                reached |= not np.isfinite(one[~others]).all()
            assert reached, "and it is told"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel == "pallas_tpu"])
def test_packed_matmul_is_that_of_float64(rng, kernel, dtype):
    args = packed_matmul_test.arguments(
        rng, *of((70, 256, (128, 256), 16, 3, 3), (2000, 1024, (512, 512), 16, 4, 32)), dtype
    )
    made = run(kernel, packed_matmul.packed_matmul, *args)
    packed_matmul_test.close(made, matmul_reference.packed_matmul(*args), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_slot_lora_is_that_of_float64(rng, kernel, dtype):
    """Whole, and in parts as where rows' inputs are split over devices."""
    form = getattr(slot_lora, kernel)
    x, a, b, onto, slot, scale = slot_lora_test.arguments(
        rng, *of((40, 256, 128, 16, 20), (500, 1024, 2048, 16, 200)), dtype
    )
    wanted = slot_reference.add(x, a, b, onto, slot, scale)
    whole, shrink, expand = (
        functools.partial(f, interpret=SMALL) for f in (form.add, form.shrink, form.expand)
    )

    def both(*args, implementation):
        return whole(*args), slot_lora_test.in_parts(shrink, expand, *args)

    for made in run(kernel, both, x, a, b, onto, slot, scale):
        packed_lora_test.close(made, wanted, dtype)


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel == "pallas_gpu"])
def test_layer_matmul_is_that_of_float64(rng, kernel, stored):
    """In its own parts, and a row's bits whatever its neighbours are."""
    for M, D, F in of(((20, 96, 70),), ((1, 2560, 4096), (64, 9728, 2560), (200, 2560, 1000))):
        x, w, layer = layer_matmul_test.arguments(rng, M, D, F, stored)
        x = x.astype(jnp.bfloat16)

        def call(x, w, layer, implementation):
            return layer_matmul.layer_matmul(x, (w,), layer, implementation=implementation)[0]

        made = np.array(run(kernel, call, x, w, layer))
        want, _ = layer_reference.layer_matmul(x, w, layer)
        # float32 sums of D exact products, in parts
        np.testing.assert_allclose(made, want, atol=1e-5 * np.abs(want).max(), rtol=0)
        spoilt = np.array(run(kernel, call, x.at[M // 2, 5].set(jnp.nan), w, layer))
        assert np.delete(spoilt, M // 2, 0).tobytes() == np.delete(made, M // 2, 0).tobytes()


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel == "pallas_gpu"])
def test_grouped_matmul_is_that_of_float64(rng, kernel, stored, transposed):
    dtype = "float32" if stored == "float32" else "bfloat16"
    sizes = tuple(rng.multinomial(of(60, 3000), rng.dirichlet(np.full(8, 0.7))).tolist())
    args = grouped_matmul_test.problem(
        rng, sizes, 7, *of((40, 50), (1024, 768)), True, transposed, dtype, stored
    )
    made = run(
        kernel, functools.partial(grouped_matmul.grouped_matmul, transposed=transposed), *args
    )
    want = grouped_reference.grouped_matmul(*args, transposed)
    # The file's own tolerance is of sums of up to 100 products; rounding grows as the root of their
    # number.
    most = grouped_matmul_test.TOLERANCE[dtype] * of(1, 4)
    np.testing.assert_allclose(
        np.array(made, np.float64), want, atol=most * np.abs(want).max(), rtol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_attention_and_its_gradients_are_those_of_float64(rng, kernel, dtype):
    q, k, v, own, parent, g = packed_attention_test.arguments(
        rng, *of((2, 2, 2, 150, 64, 64), (2, 2, 4, 1500, 128, 128)), dtype
    )
    B, K, G, T, H = q.shape
    scale = packed_attention_test.SCALE

    def both(q, k, v, own, parent, g, implementation):
        def one(q, k, v):
            flat = q.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)
            segments = Segments(own, parent)
            out = packed_attention(
                flat, k.swapaxes(1, 2), v.swapaxes(1, 2), segments, scale, kernel=implementation
            )
            return out.reshape(B, T, K, G, -1).transpose(0, 2, 3, 1, 4)

        out, back = jax.vjp(one, q, k, v)
        return out, back(g)

    out, grads = run(kernel, both, q, k, v, own, parent, g)
    want = attention_reference.attention(q, k, v, own, parent, scale)[0]
    wanted = attention_reference.gradients(q, k, v, own, parent, scale, g)
    for ours, theirs in zip((out, *grads), (want, *wanted), strict=True):
        most = packed_attention_test.TOLERANCE[dtype] * max(1, np.abs(theirs).max())
        np.testing.assert_allclose(np.array(ours, np.float64), theirs, atol=most, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_paged_attention_is_that_of_float64_and_a_row_s_alone(rng, kernel, dtype):
    scale = paged_test.SCALE
    q, k, v, rows = paged_test.arguments(
        rng, *of((6, 2, 3, 64, 128, 2), (40, 4, 8, 128, 128, 2)), dtype
    )
    call = functools.partial(paged_attention.paged_attention, scale=scale)
    made = run(kernel, call, q, k, v, rows)
    paged_test.close(made, paged_reference.paged_attention(q, k, v, rows, scale=scale), dtype)
    bad = int(rng.integers(len(q)))
    others = np.arange(len(q)) != bad
    for one, other in zip(
        run(kernel, call, q.at[bad, 0, 0, 5].set(jnp.nan), k, v, rows), made, strict=True
    ):
        assert np.array(one)[others].tobytes() == np.array(other)[others].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_latent_attention_is_that_of_float64(rng, kernel, dtype):
    scale = paged_test.SCALE
    args = paged_test.latent_arguments(rng, *of((4, 12, 256, 64, 2), (20, 64, 512, 64, 2)), dtype)
    made = run(kernel, functools.partial(latent_attention.latent_attention, scale=scale), *args)
    paged_test.close(made, latent_reference.latent_attention(*args, scale=scale), dtype)


@pytest.mark.parametrize("family", kernels_test.FAMILIES[:1] if SMALL else kernels_test.FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_model_trains_and_scores_as_by_xla(kernel, family, tiny_base, rng, calls):
    kernels_test.test_updates_and_scores_are_those_of_xla(family, kernel, tiny_base, rng, calls)
