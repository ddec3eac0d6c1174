"""Paged attention and latent attention against float64: every form, isolation, races, and what
``auto`` chooses.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, latent_attention, paged_attention
from pallas_kernels.latent_attention import reference as latent_reference
from pallas_kernels.latent_attention import xla as latent_xla
from pallas_kernels.paged import PAGE, RUN, RUN_PAGES, Rows
from pallas_kernels.paged import pallas_gpu as paged_gpu
from pallas_kernels.paged import pallas_tpu as paged_tpu
from pallas_kernels.paged_attention import cpu, reference, xla

SCALE = 0.15
NOWHERE = 2**30  # a page out of range
LENGTHS = (0, 0, 1, 31, 33, 127, 128, 129, 200)
# float32: scores of up to 15, whose last bits are in their exponentials; bfloat16: weights are
# rounded before they meet the values.
TOLERANCE = {"float32": 4e-5, "bfloat16": 2e-2}
# several chunks of a row, blocks of queries, and few copies in flight
SMALL = paged_tpu.Config(runs=2, slots=2, rows=8)
SMALL_GPU = {
    "paged": paged_gpu.Config(queries=16, keys=32, most=32, parts=3, warps=4, stages=2),
    "latent": paged_gpu.Config(queries=16, keys=64, most=32, parts=3, warps=4, stages=2),
}


def random_rows(
    rng: Any, B: int, layers: int, prefix: Any = None, own: Any = None, first: Any = None
) -> tuple[Rows, int]:
    """Rows whose two parts have any length, some of which begin behind their prefix or within it;
    and the number of pages.

    Table entries behind a part's pages are out of range.
    """
    prefix = np.asarray(rng.choice(LENGTHS, B) if prefix is None else prefix, np.int32)
    own = np.asarray(rng.choice(LENGTHS, B) if own is None else own, np.int32)
    runs = -(-prefix // RUN)
    if first is None:
        first = np.where(
            rng.random(B) < 0.3, runs, np.where(rng.random(B) < 0.3, np.minimum(runs, 1), 0)
        )
    D = (int(max(runs)) + -(-int(max(own)) // RUN) + 1) * RUN_PAGES
    table, free = np.full((B, D), NOWHERE, np.int32), list(rng.permutation(B * D))
    for b in range(B):
        for entry in range(D):
            if filled(prefix[b], own[b], entry * PAGE):
                table[b, entry] = free.pop()
    arrays = (jnp.asarray(x, jnp.int32) for x in (rng.integers(layers), table, prefix, own, first))
    return Rows(*arrays), B * D


def filled(prefix: int, own: int, position: Any) -> Any:
    begin = -(-prefix // RUN) * RUN
    return (position < prefix) | ((begin <= position) & (position < begin + own))


def random_pool(rng: Any, rows: Rows, shape: tuple[int, ...], width: int, dtype: str) -> jax.Array:
    """``[L, U, ..., PAGE, X]``: not finite, or large, wherever no token of a row is, and beyond
    ``width``.
    """
    pool = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e30], np.float32), shape)
    table, prefix, own = (np.asarray(x) for x in (rows.table, rows.prefix, rows.own))
    at = np.arange(PAGE)
    for b, entry in np.argwhere(table != NOWHERE):
        here = at[filled(prefix[b], own[b], entry * PAGE + at)]
        page = pool[int(rows.layer), table[b, entry]]
        page[..., here, :width] = rng.normal(size=(*page.shape[:-2], len(here), width))
    return jnp.array(pool, dtype)


def arguments(rng, B, K, M, H, X, L, dtype, **lengths):
    """Queries, keys, values and rows of paged attention."""
    rows, U = random_rows(rng, B, L, **lengths)
    k, v = (random_pool(rng, rows, (L, U, K, PAGE, X), H, dtype) for _ in "kv")
    return jnp.array(2 * rng.normal(size=(B, K, M, H)), dtype), k, v, rows


def latent_arguments(rng, B, M, C, J, L, dtype, **lengths):
    """Queries, latents of C and rotary keys of J dimensions, and rows; pools' widths are multiples
    of 128.
    """
    rows, U = random_rows(rng, B, L, **lengths)
    pools = (random_pool(rng, rows, (L, U, PAGE, -(-n // 128) * 128), n, dtype) for n in (C, J))
    queries = (jnp.array(rng.normal(size=(B, M, n)), dtype) for n in (C, J))
    return *queries, *pools, rows


def close(mine: Any, theirs: Any, dtype: str) -> None:
    """Compares the parts of attention with float64's: equal where a row has no token, and else the
    same attention.
    """
    (top, total, value), (want_top, want_total, want_value) = (
        tuple(np.array(x, np.float64) for x in of) for of in (mine, theirs)
    )
    none = want_total == 0
    assert (total[none] == 0).all()
    np.testing.assert_allclose(top[none], -1e30, rtol=1e-6)
    assert (value[np.broadcast_to(none, value.shape)] == 0).all()
    # The reference of the weights, the largest score, is as good as any that is near it.
    scale = np.exp(np.where(none, 0, top - want_top))
    np.testing.assert_allclose(np.where(none, 0, top - want_top), 0, atol=10 * TOLERANCE[dtype])
    np.testing.assert_allclose(scale * total, want_total, rtol=TOLERANCE[dtype])
    # A weight's error is of its own size, and so a sum's of the largest value: 4 of 100,000 normal
    # numbers (once 1.3e-5 of 3.3).
    want = want_value / np.maximum(want_total, 1)
    most = TOLERANCE[dtype] * max(1, np.abs(want).max(initial=0))
    np.testing.assert_allclose(scale * value / np.maximum(want_total, 1), want, atol=most)


def form_of(op: str, name: str):
    kind = {"paged": paged_attention, "latent": latent_attention}[op]
    if name in ("cpu", "xla"):
        own = {"paged": {"cpu": cpu, "xla": xla}, "latent": {"xla": latent_xla}}[op][name]
        return jax.jit(functools.partial(own.attend, scale=SCALE))
    kernel, small = (
        (paged_tpu, SMALL) if name.startswith("pallas_tpu") else (paged_gpu, SMALL_GPU[op])
    )
    how = small if name.endswith("small") else None
    return jax.jit(functools.partial(kind.attend, kernel, scale=SCALE, how=how, interpret=True))


PALLAS = ("pallas_tpu", "pallas_tpu small", "pallas_gpu", "pallas_gpu small")
FORMS = {
    op: {name: form_of(op, name) for name in (*PALLAS, *others)}
    for op, others in {"paged": ("cpu", "xla"), "latent": ("xla",)}.items()
}
CASES = {  # B K M H X L, or B M C J L
    "paged": [(6, 2, 3, 64, 128, 2), (5, 1, 24, 128, 128, 1), (3, 2, 96, 16, 16, 2)],
    "latent": [(6, 12, 256, 64, 2), (3, 5, 72, 8, 2)],
}
MAKE = {"paged": arguments, "latent": latent_arguments}


def wanted(op, args):
    of = {"paged": reference.paged_attention, "latent": latent_reference.latent_attention}[op]
    return of(*args, scale=SCALE)


def cases():
    for op, forms in FORMS.items():
        for form in forms:
            for k, case in enumerate(CASES[op]):
                # a width of 16 is not a multiple of a TPU's lanes
                if form.startswith("pallas_tpu") and case[-2] == 16:
                    continue
                for dtype in ("float32", "bfloat16")[: 1 if form == "cpu" else 2]:
                    quick = (k == 0 and dtype == "float32") or form in ("cpu", "xla")
                    marks = () if quick else (pytest.mark.long,)
                    yield pytest.param(op, form, case, dtype, marks=marks)


@pytest.mark.parametrize(("op", "form", "case", "dtype"), cases())
def test_values_are_those_of_float64(rng, op, form, case, dtype):
    """Lengths at random, 0 in both parts too, and NaN wherever no token is."""
    args = MAKE[op](rng, *case, dtype)
    made, want = FORMS[op][form](*args), wanted(op, args)
    # Rows without tokens get weights of masked scores, which vanish when they are joined to a part
    # that has tokens.
    if form == "xla":
        made = [np.where(np.array(want[1]) > 0, x, w) for x, w in zip(made, want)]
    close(made, want, dtype)


SMALLS = ("pallas_tpu small", "pallas_gpu small")


@pytest.mark.bits
@pytest.mark.parametrize(
    ("op", "form"),
    [*(("paged", one) for one in (*SMALLS, "cpu")), *(("latent", o) for o in SMALLS)],
)
def test_what_is_not_finite_stays_with_its_row(rng, op, form):
    """In a row's queries, keys and values: every other row keeps its bits, and the row shows it."""
    lengths = {"prefix": [200, 40, 129, 0], "own": [31, 140, 1, 33], "first": [0] * 4}
    case = (4, 2, 3, 64, 128, 2) if op == "paged" else (4, 6, 128, 64, 2)
    *args, rows = MAKE[op](rng, *case, "float32", **lengths)
    names = ("q", "key", "value") if op == "paged" else ("q", "q", "latent", "key")
    call = FORMS[op][form]
    clean = call(*args, rows)
    for value in (np.nan, np.inf, -np.inf):
        for n, name in enumerate(names):
            bad = int(rng.integers(4))
            page = int(rows.table[bad, 0])  # each row has a token there
            at = (bad, ..., 5) if name == "q" else (rows.layer, page, ..., 0, 5)
            dirty = [x.at[at].set(value) if i == n else x for i, x in enumerate(args)]
            made = call(*dirty, rows)
            others = np.arange(4) != bad
            for one, other in zip(made, clean, strict=True):
                assert np.array(one)[others].tobytes() == np.array(other)[others].tobytes(), (
                    name,
                    value,
                )
            own = np.array(made.value / made.total)[bad]
            # A score of -inf is a weight of 0, as in any softmax.
            assert not np.isfinite(own).all() or (name == "key" and not np.isnan(value))


@pytest.mark.bits
@pytest.mark.parametrize("form", [*SMALLS, "cpu"])
def test_a_row_s_bits_do_not_depend_on_the_rows_beside_it(rng, form):
    q, k, v, rows = arguments(rng, 6, 2, 3, 64, 128, 2, "float32")
    company = [rng.permutation(6), rng.integers(6, size=6)]
    # fewer rows too, whose parts XLA joins in a program of its own for GPUs
    if form.startswith("pallas_tpu"):
        company.append(company[0][:3])
    call = FORMS["paged"][form]
    together = call(q, k, v, rows)
    for some in company:
        for one, other in zip(
            call(q[some], k, v, Rows(rows.layer, *(x[some] for x in rows[1:]))), together
        ):
            np.testing.assert_array_equal(np.array(one), np.array(other)[some])


@pytest.mark.bits
def test_auto_is_the_kernel_for_cpus_on_one(rng):
    args = arguments(rng, *CASES["paged"][0], "float32")
    assert dict(dispatch.explain(paged_attention.ATTEND, *args))["pallas_tpu"] == "serves on tpu"
    auto = jax.jit(functools.partial(paged_attention.paged_attention, scale=SCALE))
    for one, other in zip(auto(*args), FORMS["paged"]["cpu"](*args)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("op", [pytest.param("paged", marks=pytest.mark.long), "latent"])
def test_the_kernel_has_no_races_and_reads_nothing_that_was_not_written(rng, op):
    """In the interpreter that keeps the device's memories and clocks, where scratch begins as NaN;
    pages out of range end it.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    lengths = {
        "prefix": [200, 0, 1, 0, 129, 33],
        "own": [129, 0, 31, 300, 0, 1],
        "first": [0, 0, 0, 0, 1, 1],
    }
    case = (6, 2, 3, 64, 128, 2) if op == "paged" else (6, 5, 128, 64, 2)
    args = MAKE[op](rng, *case, "float32", **lengths)
    module = {"paged": paged_attention, "latent": latent_attention}[op]
    for config, cores in ((SMALL, 1), (paged_tpu.Config(runs=1, slots=3), 2))[
        : 1 + (op == "paged")
    ]:
        how = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
        made = module.attend(paged_tpu, *args, scale=SCALE, how=config, interpret=how)
        close(made, wanted(op, args), "float32")
        assert not interpret_pallas_call.races.races_found


def test_a_kernel_says_why_it_does_not_serve_and_shapes_are_checked(rng):
    def spec(*dims, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(dims, dtype)

    def reason(q, k, name):
        shapes = ((), (4, 8), (4,), (4,), (4,))
        rows = Rows(*(spec(*dims, dtype="int32") for dims in shapes))
        return dict(dispatch.explain(paged_attention.ATTEND, q, k, k, rows))[name]

    q, narrow = spec(4, 2, 3, 64), spec(1, 9, 2, 32, 64)
    assert "width 64 is not a multiple of 128" in reason(q, narrow, "pallas_tpu")
    assert "MiB of a core" in reason(spec(4, 8, 8192, 128), spec(1, 9, 8, 32, 128), "pallas_tpu")
    assert reason(q, narrow, "pallas_gpu") == "serves on cuda"
    assert "not float32" in reason(q, narrow, "cpu")
    args = arguments(rng, 2, 1, 1, 64, 128, 1, "float32")
    with pytest.raises(ValueError, match=r"expected \[B, K, M, H\]"):
        paged_attention.paged_attention(args[0], args[1][..., :32], *args[2:], scale=SCALE)
    short = args[3]._replace(table=args[3].table[:, :3])
    with pytest.raises(ValueError, match="D a multiple of 4"):
        paged_attention.paged_attention(*args[:3], short, scale=SCALE)
