"""Random caches in pages for tests of attention to them, and what their compiled programs have in
common.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged import PAGE, RUN, RUN_PAGES, Rows

NOWHERE = 2**30  # a page that there is not
LENGTHS = (0, 0, 1, 31, 33, 127, 128, 129, 200)
# float32: scores of up to 15, whose last bits are in their exponentials; bfloat16: weights are
# rounded before they meet the values.
TOLERANCE = {"float32": 4e-5, "bfloat16": 2e-2}


def random_rows(
    rng: Any, B: int, layers: int, prefix: Any = None, own: Any = None, first: Any = None
) -> tuple[Rows, int]:
    """Rows of any length of both parts, some of which begin behind their prefix or within it; and
    how many pages there are.

    Entries of a table behind a part's pages name pages that are not there.
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
    """``[L, U, ..., PAGE, X]``: what is not finite, or large, wherever no token of a row is, and
    beyond ``width``.
    """
    left_over = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
    pool = rng.choice(left_over, shape)
    table, prefix, own = (np.asarray(x) for x in (rows.table, rows.prefix, rows.own))
    at = np.arange(PAGE)
    for b, entry in np.argwhere(table != NOWHERE):
        here = at[filled(prefix[b], own[b], entry * PAGE + at)]
        page = pool[int(rows.layer), table[b, entry]]
        page[..., here, :width] = rng.normal(size=(*page.shape[:-2], len(here), width))
    return jnp.array(pool, dtype)


def close(mine: Any, theirs: Any, dtype: str) -> None:
    """The parts of attention against those of float64: the same where there is nothing, and else
    the same attention.
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


def of_rows(B: int, positions: int) -> Rows:
    """Their shapes."""
    return Rows(
        *(
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((), (B, positions // PAGE), (B,), (B,), (B,))
        )
    )
