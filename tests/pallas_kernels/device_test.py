"""The kernels as an accelerator's compiler makes them, on the accelerator, against float64: ``make
test-device``.

On a machine that has none ``make test-long`` interprets both kinds of kernels here, in float32 and
at small sizes.
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


def near(made, want, most):
    """Within ``most`` of the largest entry."""
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.array(x, np.float64), y, rtol=0, atol=most * np.abs(y).max())


def lora_and_gradients(x, a, b, onto, factor, g, implementation):
    out = packed_lora.packed_lora(x, a, b, onto, factor, implementation)
    zeros = jnp.zeros_like(x)
    return out, packed_lora.gradients(x, a, b, g, zeros, factor, implementation)


# Each op: its arguments, calls and checks. Of packed LoRA one projection and two; in bfloat16 an
# even number of factors, as of all real experts.


def of_packed_lora(rng, kernel, dtype):
    for rank in of((16,), (1, 16, 24, 64)):
        for widths in ((256,), (128, 384)):
            M, D, W = of((70, 128, 10), (3000, 1024, 200))
            x, a, b, onto, factor = packed_lora_test.arguments(rng, M, D, widths, rank, W, dtype)
            g = tuple(jnp.array(rng.normal(size=y.shape), y.dtype) for y in onto)
            out, grads = run(kernel, lora_and_gradients, x, a, b, onto, factor, g)
            packed_lora_test.close(out, reference.packed_lora(x, a, b, onto, factor), dtype)
            packed_lora_test.close(grads, reference.gradients(x, a, b, g, factor), dtype)


def of_packed_matmul(rng, kernel, dtype):
    sizes = of((70, 256, (128, 256), 16, 3, 3), (2000, 1024, (512, 512), 16, 4, 32))
    args = packed_matmul_test.arguments(rng, *sizes, dtype)
    made = run(kernel, packed_matmul.packed_matmul, *args)
    packed_lora_test.close(made, matmul_reference.packed_matmul(*args), dtype)


def of_slot_lora(rng, kernel, dtype):
    """Whole, in parts as where rows' inputs are split over devices, and onto parts of products."""
    form = getattr(slot_lora, kernel)
    sizes = of((40, 256, 128, 16, 20), (500, 1024, 2048, 16, 200))
    args = slot_lora_test.arguments(rng, *sizes, dtype)
    whole, shrink, expand = (
        functools.partial(f, interpret=SMALL) for f in (form.add, form.shrink, form.expand)
    )

    def onto_parts(x, a, b, onto, slot, scale):
        parts = jnp.stack([onto.astype(jnp.float32) * part for part in (0.5, 0.25, 0.25)])
        [made] = form.add_each(x, [a], [b], [parts], slot, scale, interpret=SMALL)
        return made

    def all_ways(*args, implementation):
        made = whole(*args), slot_lora_test.in_parts(shrink, expand, *args)
        return made if kernel == "pallas_tpu" else (*made, onto_parts(*args))

    for made in run(kernel, all_ways, *args):
        packed_lora_test.close(made, slot_reference.add(*args), dtype)


def of_layer_matmul(rng, kernel, dtype):
    """In its own parts, and a row's bits whatever its neighbours are."""

    def call(x, w, layer, implementation):
        return layer_matmul.layer_matmul(x, (w,), layer, implementation=implementation)[0]

    for stored in ("bfloat16", "int8", "float8_e4m3fn"):
        for M, D, F in of(((20, 96, 70),), ((1, 2560, 4096), (64, 9728, 2560), (200, 2560, 1000))):
            x, w, layer = layer_matmul_test.arguments(rng, M, D, F, stored)
            x = x.astype(jnp.bfloat16)
            made = np.array(run(kernel, call, x, w, layer))
            near(made, layer_reference.layer_matmul(x, w, layer)[0], 1e-5)  # exact products
            spoilt = np.array(run(kernel, call, x.at[M // 2, 5].set(jnp.nan), w, layer))
            others = np.arange(M) != M // 2
            assert spoilt[others].tobytes() == made[others].tobytes()


def of_grouped_matmul(rng, kernel, dtype):
    sizes = tuple(rng.multinomial(of(60, 3000), rng.dirichlet(np.full(8, 0.7))).tolist())
    for stored in (dtype, "int8") if dtype == "bfloat16" else (dtype,):
        for back in (False, True):
            shape = 7, *of((40, 50), (1024, 768))
            args = grouped_matmul_test.problem(rng, sizes, *shape, True, back, dtype, stored)
            call = functools.partial(grouped_matmul.grouped_matmul, transposed=back)
            # The file's own tolerance is of sums of up to 100 products; rounding grows as the root
            # of their number.
            most = grouped_matmul_test.TOLERANCE[dtype] * of(1, 4)
            near(run(kernel, call, *args), grouped_reference.grouped_matmul(*args, back), most)


def of_packed_attention(rng, kernel, dtype):
    sizes = of((2, 2, 2, 150, 64, 64), (2, 2, 4, 1500, 128, 128))
    for window in of((None, 40), (None, 100, 700)):
        within_window(*packed_attention_test.arguments(rng, *sizes, dtype), kernel, window)


def within_window(q, k, v, own, parent, g, kernel, window):
    at = packed_attention_test.positions(own, parent)
    (B, K, G, T, H), scale = q.shape, packed_attention_test.SCALE

    def both(q, k, v, own, parent, g, implementation):
        def one(q, k, v):
            flat = q.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H), k.swapaxes(1, 2)
            segments = Segments(own, parent)
            how = {"kernel": implementation, "window": window, "positions_BT": at}
            out = packed_attention(*flat, v.swapaxes(1, 2), segments, scale, **how)
            return out.reshape(B, T, K, G, -1).transpose(0, 2, 3, 1, 4)

        out, back = jax.vjp(one, q, k, v)
        return out, *back(g)

    want = attention_reference.attention(q, k, v, own, parent, scale, window, at)[0]
    grads = attention_reference.gradients(q, k, v, own, parent, scale, g, window, at)
    made = run(kernel, both, q, k, v, own, parent, g)
    for ours, theirs in zip(made, (want, *grads), strict=True):
        most = packed_attention_test.TOLERANCE[str(q.dtype)] * max(1, np.abs(theirs).max())
        np.testing.assert_allclose(np.array(ours, np.float64), theirs, atol=most, rtol=0)


def of_paged_attention(rng, kernel, dtype):
    """Values, and a row's bits whatever its neighbour is."""
    scale, sizes = paged_test.SCALE, of((6, 2, 3, 64, 128, 2), (40, 4, 8, 128, 128, 2))
    q, *rest = paged_test.arguments(rng, *sizes, dtype)
    call = functools.partial(paged_attention.paged_attention, scale=scale)
    made = run(kernel, call, q, *rest)
    paged_test.close(made, paged_reference.paged_attention(q, *rest, scale=scale), dtype)
    bad = int(rng.integers(len(q)))
    others = np.arange(len(q)) != bad
    spoilt = run(kernel, call, q.at[bad, 0, 0, 5].set(jnp.nan), *rest)
    for one, other in zip(spoilt, made, strict=True):
        assert np.array(one)[others].tobytes() == np.array(other)[others].tobytes()


def of_latent_attention(rng, kernel, dtype):
    scale, sizes = paged_test.SCALE, of((4, 12, 256, 64, 2), (20, 64, 512, 64, 2))
    args = paged_test.latent_arguments(rng, *sizes, dtype)
    made = run(kernel, functools.partial(latent_attention.latent_attention, scale=scale), *args)
    paged_test.close(made, latent_reference.latent_attention(*args, scale=scale), dtype)


OPS = (of_packed_lora, of_slot_lora, of_packed_attention, of_paged_attention, of_latent_attention)
ONLY = {"pallas_tpu": (of_packed_matmul,), "pallas_gpu": (of_layer_matmul, of_grouped_matmul)}


@pytest.mark.parametrize("dtype", ["float32", *([] if SMALL else ["bfloat16"])])
@pytest.mark.parametrize(
    ("kernel", "op"), [(kernel, op) for kernel in KERNELS for op in (*OPS, *ONLY[kernel])]
)
def test_results_are_those_of_float64(rng, kernel, op, dtype):
    op(rng, kernel, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite_stays_with_its_adapter(rng, kernel):
    M, D, W = of((90, 128, 24), (1000, 512, 64))
    x, a, b, onto, _ = packed_lora_test.arguments(rng, M, D, (128, 256), 16, W, "float32")
    factor = jnp.array(np.sort(rng.integers(0, W, M)), jnp.int32)
    both = jax.jit(functools.partial(lora_and_gradients, implementation=kernel))
    packed_lora_test.check_isolation(rng, both, x, a, b, onto, factor)


@pytest.mark.skipif(SMALL, reason="train/kernels_test.py has the interpreted kernels")
@pytest.mark.parametrize("family", kernels_test.FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_model_trains_and_scores_as_by_xla(kernel, family, tiny_base, rng, calls):
    kernels_test.test_updates_and_scores_are_those_of_xla(family, kernel, tiny_base, rng, calls)
