"""Packed LoRA against float64, each implementation, forward and backward; isolation, races, vmap,
and what TPUs' compilers make of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, packed_lora
from pallas_kernels.packed_lora import halves, pallas_gpu, pallas_tpu, reference, xla
from tests.marks import first

# Several tiles and blocks of columns.
SMALL, SMALL_GPU = (
    pallas_tpu.Config(rows=32, columns=128),
    pallas_gpu.Config(rows=16, depth=64, sums=32, warps=4),
)


def in_halves(kernels):
    """Both passes by products with one factor each."""
    shrink, expand, outer = (
        functools.partial(kernels[kind].call, interpret=True)
        for kind in ("shrink", "expand", "outer")
    )

    def add(x, a, b, onto, factor, scale=None):
        h = [shrink(x, one, factor) for one in a]
        h = h if scale is None else [(one * scale[:, None]).astype(one.dtype) for one in h]
        return [expand(one, b_k, y, factor) for one, b_k, y in zip(h, b, onto)]

    def backward(x, a, b, g, dx, factor):
        da, db = [], []
        for a_k, b_k, g_k in zip(a, b, g):
            h, dh = shrink(x, a_k, factor), shrink(g_k, b_k, factor)
            da.append(outer(dh, x, a_k, factor))
            db.append(outer(h, g_k, b_k, factor))
            dx = expand(dh, a_k, dx, factor)
        return dx, da, db

    return jax.jit(add), jax.jit(backward)


FORMS = {
    "pallas_tpu": tuple(
        jax.jit(functools.partial(f, config=SMALL, interpret=True))
        for f in (pallas_tpu.add, pallas_tpu.backward)
    ),
    "pallas_gpu": tuple(
        jax.jit(functools.partial(f, how=SMALL_GPU, interpret=True))
        for f in (pallas_gpu.add, pallas_gpu.backward)
    ),
    "xla": (jax.jit(xla.add), jax.jit(xla.backward)),
    "halves, tpu": in_halves(halves.KERNELS[0]),
    "halves, gpu": in_halves(halves.KERNELS[1]),
}


def dtype_of(form, dtype):
    """XLA has no product of bfloat16 on CPUs as the interpreted ``outer`` of TPUs makes it."""
    return "float32" if form == "halves, tpu" else dtype


def random_factor(rng, M: int, W: int) -> np.ndarray:
    """Runs of any length, of some of the factors, each once, and rows of none between them."""
    out: list[int] = []
    for w in rng.permutation(W):
        out += [-1] * int(rng.choice([0, 0, 0, 1, 5]))
        out += [int(w)] * int(rng.choice([0, 1, 2, 7, 40]))
    return np.int32((out + [-1] * M)[:M])


def arguments(rng, M, D, widths, R, W, dtype):
    def normal(*shape, scale=1.0):
        return jnp.array(scale * rng.normal(size=shape), dtype)

    a = [normal(W, R, D, scale=D**-0.5) for _ in widths]
    b = [normal(W, R, F, scale=R**-0.5) for F in widths]
    return normal(M, D), a, b, [normal(M, F) for F in widths], jnp.array(random_factor(rng, M, W))


# Of the largest entry. float32: sums of up to 384 products in another order; bfloat16: one rounding
# of the result and one of ``h``.
TOLERANCE = {"float32": 3e-6, "bfloat16": 1.5e-2}


def close(mine, theirs, dtype):
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(
            np.array(x, np.float64), y, atol=TOLERANCE[dtype] * max(1.0, np.abs(y).max()), rtol=0
        )


CASES = [
    (70, 256, (128, 256), 16, 9, "float32"),
    (130, 128, (384, 128), 1, 80, "bfloat16"),  # two factors are fetched at a time
    (33, 128, (128, 128), 4, 40, "bfloat16"),
    (100, 128, (128,), 256, 3, "float32"),
    (200, 128, (128,), 32, 2, "bfloat16"),  # runs longer than tiles
    (70, 128, (128, 256), 24, 30, "bfloat16"),  # chunks of fewer columns than a matrix unit has
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", first(1, CASES), ids=str)
def test_values_and_gradients_are_those_of_float64(rng, form, case):
    add, backward = FORMS[form]
    case = (*case[:-1], dtype_of(form, case[-1]))
    x, a, b, onto, factor = arguments(rng, *case)
    scale = jnp.array(rng.uniform(0.5, 2, x.shape[0]), jnp.float32)
    for scales in (None, scale):
        want = reference.packed_lora(x, a, b, onto, factor, scales)
        close(add(x, a, b, onto, factor, scales), want, case[-1])
    *g, dx_onto = (jnp.array(rng.normal(size=y.shape), y.dtype) for y in (*onto, x))
    dx, da, db = reference.gradients(x, a, b, g, factor)
    want = dx + np.array(dx_onto, np.float64), da, db
    close(backward(x, a, b, g, dx_onto, factor), want, case[-1])


def check_isolation(rng, both, x, a, b, onto, factor):
    """Asserts that non-finite factors, rows and cotangents change no bit of other adapters' rows
    and gradients, and are seen in their own; ``both(x, a, b, onto, factor, g)`` runs both passes,
    or the forward one if ``onto`` is empty.
    """
    g = [jnp.array(rng.normal(size=y.shape), y.dtype) for y in onto]
    clean = jax.tree.leaves(both(x, a, b, onto, factor, g))
    row = int(rng.choice(np.flatnonzero(np.array(factor) >= 0)))
    bad, W = int(factor[row]), a[0].shape[0]
    mine = np.array(factor) == bad
    for value in (np.nan, np.inf, -np.inf):
        for where in ("a", "b", "x", *(["g"] if g else [])):
            args = {"x": [x], "a": list(a), "b": list(b), "g": list(g)}
            k = 0 if where == "x" else int(rng.integers(len(a)))
            at = (bad, int(rng.integers(a[0].shape[1]))) if where in "ab" else (row,)
            at = (*at, int(rng.integers(args[where][k].shape[-1])))
            args[where][k] = args[where][k].at[at].set(value)
            made = both(args["x"][0], args["a"], args["b"], onto, factor, args["g"])
            reached = False
            for one, other in zip(jax.tree.leaves(made), clean, strict=True):
                others = ~mine if len(one) == len(mine) else np.arange(W) != bad
                same = np.array(one)[others].tobytes() == np.array(other)[others].tobytes()
                assert same, (where, value)
                reached |= not np.isfinite(np.array(one, np.float32)[~others]).all()
            assert reached, "and it is told"


# Tiles of 32 rows with six adapters and more, and with three; a word of memory with two factors.
@pytest.mark.parametrize(
    "case", first(1, [(5, 16, "float32"), (12, 16, "float32"), (3, 1, "bfloat16")]), ids=str
)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_stays_with_its_adapter(rng, form, case):
    """Also beside it in the matrix unit."""
    run, R, dtype = case
    add, backward = FORMS[form]
    x, a, b, onto, factor = arguments(rng, 90, 128, (128, 256), R, 30, dtype_of(form, dtype))
    factor = jnp.array(np.repeat(rng.permutation(30)[: -(-90 // run)], run)[:90].astype(np.int32))

    def both(x, a, b, onto, factor, g):
        zeros = jnp.zeros_like(x)
        return add(x, a, b, onto, factor), backward(x, a, b, g, zeros, factor)

    check_isolation(rng, both, x, a, b, onto, factor)


def test_kernels_have_no_races_and_read_nothing_that_was_not_written(rng):
    """In the interpreter that keeps the device's memories and clocks, where scratch begins as NaN;
    several chunks and tiles.
    """
    x, a, b, onto, _ = arguments(rng, 48, 128, (128,), 64, 8, "float32")
    factor = jnp.array([0] * 3 + [-1] + [1] * 4 + [2] * 20 + [3] * 2 + [5] * 9 + [7] * 9, jnp.int32)
    g = [jnp.array(rng.normal(size=y.shape), y.dtype) for y in onto]
    config = pallas_tpu.Config(rows=16, columns=128)
    how = pltpu.InterpretParams(detect_races=True)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    made = pallas_tpu.add(x, a, b, onto, factor, config=config, interpret=how)
    close(made, reference.packed_lora(x, a, b, onto, factor), "float32")
    assert not interpret_pallas_call.races.races_found
    made = pallas_tpu.backward(x, a, b, g, jnp.zeros_like(x), factor, config=config, interpret=how)
    close(made, reference.gradients(x, a, b, g, factor), "float32")
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("form", FORMS)
def test_a_number_beyond_the_stack_is_its_last_ones(rng, form):
    """A copy from behind an array's end would read another one's memory, and one to there would
    write it.
    """
    add, backward = FORMS[form]
    x, a, b, onto, _ = arguments(rng, 16, 128, (128,), 64, 3, "float32")
    factor, meant = (jnp.array([0] * 5 + [last] * 6 + [-1] * 5, jnp.int32) for last in (3, 2))
    close(add(x, a, b, onto, factor), reference.packed_lora(x, a, b, onto, meant), "float32")
    made = backward(x, a, b, onto, jnp.zeros_like(x), factor)
    close(made, reference.gradients(x, a, b, onto, meant), "float32")


def test_an_implementation_says_why_it_does_not_serve_and_auto_takes_the_next(rng):
    # of an even number of factors two are fetched at a time
    x, a, b, onto, factor = arguments(rng, 16, 128, (128,), 1, 5, "bfloat16")
    why = "rank 1 in bfloat16 would be copied whole"
    assert dict(dispatch.explain(packed_lora.ADD, x, a, b, onto, factor)) == {
        "pallas_tpu": f"does not serve: {why}",
        "pallas_gpu": "serves on cuda",
        "xla": "serves on any platform",
    }
    for name, message in (
        ("pallas_tpu", f"by pallas_tpu: {why}; choose auto or one of: pallas_gpu, xla"),
        ("cuda", "no implementation 'cuda'; choose one of: auto, pallas_tpu, pallas_gpu, xla"),
    ):
        with pytest.raises(ValueError, match=message):
            packed_lora.packed_lora(x, a, b, onto, factor, implementation=name)
    with pytest.raises(ValueError, match=r"expected \[M, D\], \[W, R, D\]"):
        packed_lora.packed_lora(x, a, [w[:, :, :64] for w in b], onto, factor)
    before = dispatch.fallen.total()
    made = packed_lora.packed_lora(x, a, b, onto, factor)
    close(made, reference.packed_lora(x, a, b, onto, factor), "bfloat16")
    assert dispatch.fallen.total() == before + 1
