"""Packed matmul against float64, forward and backward; isolation, races, vmap, and what TPUs'
compilers make of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mint_jax.models import quantised
from pallas_kernels.packed_matmul import pallas_tpu, reference, xla
from tests.marks import first
from tests.pallas_kernels.packed_lora_test import check_isolation, close

SMALL = pallas_tpu.Config(rows=32, columns=128)  # several tiles and blocks of columns
FORMS = {
    "pallas_tpu": jax.jit(functools.partial(pallas_tpu.matmul, how=SMALL, interpret=True)),
    "xla": jax.jit(xla.matmul),
}


def arguments(rng, M, D, widths, R, adapters, E, dtype):
    """Experts of any size, some of none, rows behind the last, and of each expert rows of some of
    its adapters, or of none.
    """

    def normal(*shape, scale=1.0):
        return jnp.array(scale * rng.normal(size=shape), dtype)

    W, rows = adapters * E, M - int(rng.integers(0, M // 4))
    sizes = rng.multinomial(rows, rng.dirichlet(np.full(E, 0.7)))
    of_rows = [np.sort(rng.integers(-1, adapters, size)) for size in sizes]
    named = [np.where(one < 0, -1, one * E + e) for e, one in enumerate(of_rows)]
    factor = np.concatenate([*named, np.full(M - rows, -1)])
    w = [normal(E, D, F, scale=D**-0.5) for F in widths]
    a = [normal(W, R, D, scale=D**-0.5) for _ in widths]
    b = [normal(W, R, F, scale=R**-0.5) for F in widths]
    return normal(M, D), w, jnp.array(sizes, jnp.int32), a, b, jnp.array(factor, jnp.int32)


CASES = [
    (70, 256, (128, 256), 16, 3, 3, "float32"),
    (100, 128, (128, 128), 32, 12, 2, "bfloat16"),  # several chunks
    (130, 128, (384,), 1, 40, 2, "float32"),
    (33, 128, (128, 128), 4, 4, 30, "bfloat16"),  # more experts than tiles
    (100, 128, (128,), 256, 2, 2, "float32"),
    (5, 128, (128,), 8, 4, 3, "float32"),
    (70, 256, (128, 256), 24, 3, 6, "bfloat16"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", first(1, CASES), ids=str)
def test_values_are_those_of_float64(rng, form, case):
    args = arguments(rng, *case)
    scale = jnp.array(rng.uniform(0.5, 2, case[0]), jnp.float32)
    for scales in (None, scale):
        close(FORMS[form](*args, scales), reference.packed_matmul(*args, scales), case[-1])


@pytest.mark.parametrize("case", first(1, [CASES[i] for i in (1, 0, 3, 4)]), ids=str)
@pytest.mark.parametrize("kind", quantised.KINDS)
def test_matrices_may_be_of_8_bits_with_a_scale_for_each_column(rng, kind, case):
    """Of one of several layers, whose scales are the layer's own."""
    x, w, sizes, a, b, factor = arguments(rng, *case)
    spread = [rng.uniform(0.1, 10, (len(one), 1, one.shape[2])) for one in w]
    small = [quantised.quantise(np.array(m, np.float32) * s, kind) for m, s in zip(w, spread)]
    stack = [jnp.concatenate([jnp.array(q), -jnp.array(q)]) for q, _ in small]
    w_scale = [jnp.array(scale) for _, scale in small]
    rest = sizes, a, b, factor, jnp.array(rng.uniform(0.5, 2, case[0]), jnp.float32)
    full = [np.float64(q) * scale[:, None] for q, scale in small]
    wanted = reference.packed_matmul(x, full, *rest)
    other = reference.packed_matmul(x, [-one for one in full], *rest)
    run = FORMS["pallas_tpu"]
    close(run(x, stack, *rest, first=jnp.int32(0), w_scale=w_scale), wanted, case[-1])
    close(run(x, stack, *rest, first=jnp.int32(len(w[0])), w_scale=w_scale), other, case[-1])


@pytest.mark.long
def test_the_kernel_has_no_races_and_reads_nothing_that_was_not_written(rng):
    """In the interpreter that keeps the device's memories and clocks, where scratch begins as NaN;
    several chunks and tiles, and two experts in a tile.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    x, w, _, a, b, _ = arguments(rng, 48, 128, (128,), 64, 4, 2, "float32")
    sizes, counts = jnp.array([20, 22], jnp.int32), (3, 7, 2, 7, 1, 9, 1, 1, 5, 12)
    factor = jnp.array(np.repeat([0, 2, 4, 6, -1, 1, 3, 5, 7, -1], counts), jnp.int32)
    how = {"how": pallas_tpu.Config(rows=16, columns=128)}
    how["interpret"] = pltpu.InterpretParams(detect_races=True)
    made = pallas_tpu.matmul(x, w, sizes, a, b, factor, **how)
    close(made, reference.packed_matmul(x, w, sizes, a, b, factor), "float32")
    assert not interpret_pallas_call.races.races_found


# of rank 16: half a chunk and less, and several chunks
@pytest.mark.parametrize("many", [3, 20], ids=lambda many: f"{many} adapters")
@pytest.mark.parametrize(
    "form", [*FORMS, *(pytest.param(kind, marks=pytest.mark.long) for kind in quantised.KINDS)]
)
def test_what_is_not_finite_stays_with_its_adapter(rng, form, many):
    """Also beside it in the matrix unit and in the tile; experts of 8 bits too."""
    call, M, E = FORMS.get(form, FORMS["pallas_tpu"]), 75, 3
    x, w, _, a, b, _ = arguments(rng, M, 128, (128, 256), 16, many, E, "bfloat16")
    if form in quantised.KINDS:
        w, w_scale = zip(
            *(map(jnp.array, quantised.quantise(np.array(one, np.float32), form)) for one in w)
        )
        call = functools.partial(call, w_scale=w_scale)
    sizes = jnp.array([30, 0, 40], jnp.int32)
    first, last = (np.sort(np.resize(rng.permutation(many), n)) * E for n in (29, 40))
    factor = jnp.array([-1, *first, *(last + 2)] + [-1] * 5)

    def run(x, a, b, onto, factor, g):
        return call(x, w, sizes, a, b, factor)

    check_isolation(rng, run, x, a, b, [], factor)
