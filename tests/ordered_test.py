"""Sums of segments: float64, what is not finite, gradients, and that no GPU adds by a scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import ordered

FORMS = {"a GPU's": ordered.sorted_sum, "here": ordered.segment_sum}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(1,), (257, 5)], ids=str)
def test_sums_are_those_of_float64(rng, form, shape):
    # ids of 40 and more are nobody's
    values, ids, many = rng.normal(size=shape).astype(np.float32), rng.integers(0, 45, shape[0]), 40
    want = np.zeros((45, *shape[1:]))
    np.add.at(want, ids, values.astype(np.float64))
    made = jax.jit(form, static_argnums=2)(jnp.array(values), jnp.array(ids), many)
    np.testing.assert_allclose(made, want[:many], atol=1e-5)  # some ten numbers of size 1 in each


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_not_finite_stays_in_its_segment(rng, form):
    values, ids = rng.normal(size=(120, 3)).astype(np.float32), rng.integers(0, 9, 120)
    form = jax.jit(form, static_argnums=2)
    clean = np.array(form(values, ids, 9))
    for value in (np.nan, np.inf, -np.inf):
        spoilt = values.copy()
        at = int(rng.integers(120))
        spoilt[at, 1] = value
        made = np.array(form(spoilt, ids, 9))
        others = np.ones((9, 3), bool)
        others[ids[at], 1] = False
        assert made[others].tobytes() == clean[others].tobytes()
        assert not np.isfinite(made[ids[at], 1])


def test_gradients(rng):
    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    values, ids, g = normal(50, 2), rng.integers(0, 8, 50), normal(7, 2)
    _, back = jax.vjp(lambda v: ordered.segment_sum(v, jnp.array(ids), 7), jnp.array(values))
    np.testing.assert_array_equal(
        back(jnp.array(g))[0], np.where((ids < 7)[:, None], g[np.minimum(ids, 6)], 0)
    )
    table, g, ids = normal(3, 11), normal(40, 3), rng.integers(0, 11, (2, 40))
    out, back = jax.vjp(
        lambda a: jax.vmap(ordered.columns, (None, 0))(a, jnp.array(ids)), jnp.array(table)
    )
    np.testing.assert_array_equal(out, np.swapaxes(table[:, ids], 0, 1).swapaxes(1, 2))
    want = np.zeros((11, 3))
    for one in ids:
        np.add.at(want, one, g.astype(np.float64))
    np.testing.assert_allclose(back(jnp.stack([jnp.array(g)] * 2))[0], want.T, atol=1e-5)
