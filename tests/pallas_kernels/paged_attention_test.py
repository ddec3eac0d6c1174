"""Attention to a paged cache against float64, by XLA and by the kernels: isolation, races,
compilation ahead of time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, paged_attention
from pallas_kernels.paged import Rows
from pallas_kernels.paged import pallas_gpu as paged_gpu
from pallas_kernels.paged import pallas_tpu as paged_tpu
from pallas_kernels.paged_attention import cpu, pallas, reference, shapes, xla
from tests.marks import first
from tests.pallas_kernels import pages

SCALE = 0.15
# several chunks of a row, blocks of queries, and little that is under way
SMALL = paged_tpu.Config(runs=2, slots=2, rows=8)
SMALL_GPU = paged_gpu.Config(queries=16, keys=32, most=32, parts=3, warps=4, stages=2)
KERNELS = ("pallas_tpu", "pallas_tpu small", "pallas_gpu", "pallas_gpu small", "cpu")
FORMS = {
    "pallas_tpu": jax.jit(functools.partial(pallas.attend, paged_tpu, scale=SCALE, interpret=True)),
    "pallas_tpu small": jax.jit(
        functools.partial(pallas.attend, paged_tpu, scale=SCALE, how=SMALL, interpret=True)
    ),
    "pallas_gpu": jax.jit(functools.partial(pallas.attend, paged_gpu, scale=SCALE, interpret=True)),
    "pallas_gpu small": jax.jit(
        functools.partial(pallas.attend, paged_gpu, scale=SCALE, how=SMALL_GPU, interpret=True)
    ),
    "cpu": jax.jit(functools.partial(cpu.attend, scale=SCALE)),
    "xla": jax.jit(functools.partial(xla.attend, scale=SCALE)),
}


def arguments(rng, B, K, M, H, X, L, dtype, **lengths):
    rows, U = pages.random_rows(rng, B, L, **lengths)
    k, v = (pages.random_pool(rng, rows, (L, U, K, pages.PAGE, X), H, dtype) for _ in "kv")
    return jnp.array(2 * rng.normal(size=(B, K, M, H)), dtype), k, v, rows


def wanted(args):
    return reference.paged_attention(*args, scale=SCALE)


CASES = [  # B K M H X L
    (6, 2, 3, 64, 128, 2, "float32"),
    (5, 1, 24, 128, 128, 1, "float32"),
    (4, 2, 16, 128, 128, 2, "bfloat16"),
]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "cpu"])
@pytest.mark.parametrize("case", first(1, CASES), ids=str)
def test_values_are_those_of_float64(rng, form, case):
    """Lengths at random, 0 in both parts too, and NaN wherever no token is."""
    args = arguments(rng, *case)
    made = FORMS[form](*args)
    # for rows that have nothing it gives weights of masked scores, which vanish when it is joined
    # to a part that has
    if form == "xla":
        there = np.array(wanted(args)[1]) > 0
        made = [np.where(there, x, w) for x, w in zip(made, wanted(args))]
    pages.close(made, wanted(args), case[-1])


@pytest.mark.parametrize(
    "case",
    [(6, 2, 3, 64, 128, 2), (5, 1, 24, 128, 128, 1), (3, 2, 96, 16, 16, 2), (9, 3, 1, 48, 64, 2)],
    ids=str,
)
def test_values_of_the_kernel_for_cpus_are_those_of_float64(rng, case):
    args = arguments(rng, *case, "float32")
    pages.close(FORMS["cpu"](*args), wanted(args), "float32")


@pytest.mark.bits
def test_a_query_s_bits_on_cpus_do_not_depend_on_the_queries_beside_it(rng):
    """A row that reads its prompt alone and one in a team of eight give the same tokens."""
    q, k, v, rows = arguments(rng, 4, 2, 24, 64, 64, 2, "float32")
    together = FORMS["cpu"](q, k, v, rows)
    for some in (range(3), [5], range(7, 14), range(24)):
        for one, other in zip(FORMS["cpu"](q[:, :, np.array(some)], k, v, rows), together):
            np.testing.assert_array_equal(one, np.array(other)[:, :, np.array(some)])


def test_what_the_kernel_for_cpus_does_not_serve_it_says(rng):
    for case, why in (
        ((2, 1, 2, 64, 64, 1, "bfloat16"), "not float32"),
        ((2, 1, 2, 40, 64, 1, "float32"), "a multiple of 16"),
    ):
        assert why in dict(dispatch.explain(paged_attention.ATTEND, *arguments(rng, *case)))["cpu"]


@pytest.mark.bits
def test_auto_is_the_kernel_for_cpus_on_one(rng):
    args = arguments(rng, *CASES[0])
    assert dict(dispatch.explain(paged_attention.ATTEND, *args))["pallas_tpu"] == "serves on tpu"
    for one, other in zip(
        jax.jit(functools.partial(paged_attention.paged_attention, scale=SCALE))(*args),
        FORMS["cpu"](*args),
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize(
    "lengths",
    first(1, [([256, 0, 0, 1], [0, 0, 128, 300]), ([0] * 4, [0] * 4), ([129] * 4, [127] * 4)]),
    ids=str,
)
def test_rows_that_have_nothing_are_passed_over_wherever_they_stand(rng, lengths):
    prefix, own = lengths
    args = arguments(rng, 4, 2, 3, 64, 128, 2, "float32", prefix=prefix, own=own, first=[0] * 4)
    for form in KERNELS:
        pages.close(FORMS[form](*args), wanted(args), "float32")


@pytest.mark.bits
@pytest.mark.parametrize("form", KERNELS)
def test_what_is_not_finite_stays_with_its_row(rng, form):
    """In a row's query, keys and values: every other row keeps its bits, and the row tells."""
    lengths = {"prefix": [200, 40, 129, 0], "own": [31, 140, 1, 33], "first": [0] * 4}
    q, k, v, rows = arguments(rng, 4, 2, 3, 64, 128, 2, "float32", **lengths)
    clean = FORMS[form](q, k, v, rows)
    for value in (np.nan, np.inf, -np.inf):
        for where in "qkv":
            bad = int(rng.integers(4))
            # each row has a token there
            page, at, h = int(rows.table[bad, 0]), 0, int(rng.integers(2))
            args = {"q": q, "k": k, "v": v}
            place = (
                (bad, h, slice(None), 5)
                if where == "q"
                else (rows.layer, page, h, at, slice(None) if where == "v" else 5)
            )
            args[where] = args[where].at[place].set(value)
            made = FORMS[form](*args.values(), rows)
            for one, other in zip(made, clean, strict=True):
                others = np.arange(4) != bad
                assert np.array(one)[others].tobytes() == np.array(other)[others].tobytes(), (
                    where,
                    value,
                )
            told = np.array(made.value / made.total)[bad, h]
            # A score of -inf is a weight of 0, as in any softmax; a query's infinity meets keys of
            # both signs.
            assert not np.isfinite(told).all() or where == "k", (where, value)
            if where == "k" and np.isnan(value):
                assert np.isnan(told).any()


@pytest.mark.bits
@pytest.mark.parametrize("form", ["pallas_tpu small", "pallas_gpu small", "cpu"])
def test_a_row_s_bits_do_not_depend_on_the_rows_beside_it(rng, form):
    q, k, v, rows = arguments(rng, 6, 2, 3, 64, 128, 2, "float32")
    company = [rng.permutation(6), rng.integers(6, size=6)]
    # fewer rows too, whose parts XLA joins in a program of its own for GPUs
    if form.startswith("pallas_tpu"):
        company.append(company[0][:3])
    form = FORMS[form]
    together = form(q, k, v, rows)
    for some in company:
        for one, other in zip(
            form(q[some], k, v, Rows(rows.layer, *(x[some] for x in rows[1:]))), together
        ):
            np.testing.assert_array_equal(np.array(one), np.array(other)[some])


def test_the_kernel_has_no_races_and_reads_nothing_that_was_not_written(rng):
    """In the interpreter that keeps the device's memories and clocks, where scratch begins as NaN;
    pages that are not there end it.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    args = arguments(
        rng,
        6,
        2,
        3,
        64,
        128,
        2,
        "float32",
        prefix=[200, 0, 1, 0, 129, 33],
        own=[129, 0, 31, 300, 0, 1],
        first=[0, 0, 0, 0, 1, 1],
    )
    for config, cores in ((SMALL, 1), (paged_tpu.Config(runs=1, slots=3), 2)):
        how = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
        pages.close(
            pallas.attend(paged_tpu, *args, scale=SCALE, how=config, interpret=how),
            wanted(args),
            "float32",
        )
        assert not interpret_pallas_call.races.races_found


def test_an_implementation_says_why_it_does_not_serve_and_shapes_are_checked(rng):
    def spec(*dims, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(dims, dtype)

    def told(q, k, name="pallas_tpu"):
        return dict(
            dispatch.explain(paged_attention.ATTEND, q, k, k, pages.of_rows(4, 8 * pages.PAGE))
        )[name]

    assert told(spec(4, 2, 3, 64), spec(1, 9, 2, 32, 128)) == "serves on tpu"
    assert (
        told(spec(4, 2, 3, 64), spec(1, 9, 2, 32, 64))
        == "does not serve: a pool's width 64 is not a multiple of 128"
    )
    assert "all bfloat16 or all float32" in told(
        spec(4, 2, 3, 64, dtype="float32"), spec(1, 9, 2, 32, 128)
    )
    assert "MiB of a core's memory" in told(spec(4, 8, 8192, 128), spec(1, 9, 8, 32, 128))
    assert told(spec(4, 2, 3, 64), spec(1, 9, 2, 32, 64), name="pallas_gpu") == "serves on cuda"
    assert "all bfloat16 or all float32" in told(
        spec(4, 2, 3, 64, dtype="float16"), spec(1, 9, 2, 32, 64), name="pallas_gpu"
    )
    assert (
        told(spec(4, 2, 0, 64), spec(1, 9, 2, 32, 64), name="pallas_gpu")
        == "does not serve: no queries or no pages"
    )
    args = arguments(rng, 2, 1, 1, 64, 128, 1, "float32")
    with pytest.raises(ValueError, match=r"expected \[B, K, M, H\]"):
        paged_attention.paged_attention(args[0], args[1][..., :32], *args[2:], scale=SCALE)
    with pytest.raises(ValueError, match="D a multiple of 4"):
        paged_attention.paged_attention(
            *args[:3], args[3]._replace(table=args[3].table[:, :3]), scale=SCALE
        )
    with pytest.raises(ValueError, match="prefix, own and first have shapes"):
        paged_attention.paged_attention(
            *args[:3], args[3]._replace(prefix=args[3].prefix[:1]), scale=SCALE
        )


def arrays(shape: shapes.Shape):
    B, K, M, H, X, positions, dtype = shape
    pool = jax.ShapeDtypeStruct((2, 4096, K, pages.PAGE, X), dtype)
    return jax.ShapeDtypeStruct((B, K, M, H), dtype), pool, pool, pages.of_rows(B, positions)


ALL = (*shapes.DECODE, *shapes.TEAMS, *shapes.PREFILL)


@pytest.mark.parametrize("shape", ALL, ids=str)
def test_a_gpus_programs_are_many_even_where_rows_are_few(shape):
    """Parts of a row: enough for the processors, unless they would be shorter than 4 runs or their
    sums take more than 16 MiB.
    """
    q, *pools, rows = arrays(shape)
    how = paged_gpu.config([q], pools, shape.head_dim, shape.positions)
    programs = how.parts * shape.rows * shape.heads * -(-shape.queries // how.queries)
    held = 4 * how.parts * q.size
    assert how.parts == 1 or held <= paged_gpu.PARTS_BYTES
    assert (
        programs >= paged_gpu.PROGRAMS
        or 2 * held > paged_gpu.PARTS_BYTES
        or 2 * how.parts * 4 * 128 > shape.positions
    )
