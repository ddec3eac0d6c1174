"""Tokens drawn by the kernel for CPUs and by XLA: float64, the noise bit by bit, ties, bits of
rows, what is not finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.draw import DRAW, cpu, draw, reference, xla

# a vector's part, vectors, runs of four of them, and what is left of each
WIDTHS = [1, 17, 300, 4099]
kernel, by_xla = jax.jit(cpu.draw), jax.jit(xla.draw)
forms = pytest.mark.parametrize("form", [kernel, by_xla], ids=["cpu", "xla"])


def arguments(rng, V, R=7, temperatures=(0.0, 0.3, 1.0, 2.5)):
    z = jnp.array(rng.normal(size=(R, V)) * 10.0 ** rng.uniform(-3, 1.5, (R, 1)), jnp.float32)
    temperature = jnp.array([temperatures[i % len(temperatures)] for i in range(R)], jnp.float32)
    return z, temperature, jnp.array(rng.integers(0, 2**32, (R, 2), dtype=np.uint32))


def take(drawn, rows):
    return [np.array(x)[rows] for x in drawn]


def equal(one, two):
    pairs = zip(one, two, strict=True)
    return all(np.array(x).tobytes() == np.array(y).tobytes() for x, y in pairs)


@forms
@pytest.mark.parametrize("V", WIDTHS)
def test_values_are_those_of_float64(rng, form, V):
    z, temperature, keys = arguments(rng, V)
    made, (total, warm, score) = form(z, temperature, keys), reference.draw(z, temperature, keys)
    np.testing.assert_array_equal(made.top, np.array(z).max(-1))
    # exp is within 2e-7, of a number that is rounded too, and V sums of it within 6e-8 sqrt(V); the
    # result's rounding is its own size's.
    rounding = {"rtol": 3e-7, "atol": 4e-7 + 6e-8 * V**0.5}
    np.testing.assert_allclose(made.total, total, **rounding)
    np.testing.assert_allclose(made.warm, warm, **rounding)
    picked = np.take_along_axis(score, np.array(made.token)[:, None], axis=1)[:, 0]
    assert (score.max(-1) - picked <= 1e-6 + 3e-7 * np.abs(score).max(-1)).all()


def test_the_kernel_draws_what_xla_draws(rng):
    """64 rows of 16,000 numbers: a rounding of 1e-6 decides one draw in a million."""
    z, temperature, keys = arguments(rng, 16_000, R=64)
    made, want = kernel(z, temperature, keys), by_xla(z, temperature, keys)
    np.testing.assert_array_equal(made.token, want.token)
    np.testing.assert_allclose(made.total, want.total, rtol=3e-7, atol=4e-6)


@forms
@pytest.mark.parametrize("V", WIDTHS)
def test_of_equals_the_first_is_taken_wherever_they_stand(rng, form, V):
    z = np.array(rng.integers(-3, 3, (50, V)), np.float32)
    at = rng.integers(0, V, (50, 3))
    np.put_along_axis(z, at, 7.0, axis=1)
    made = form(jnp.array(z), jnp.zeros(50), jnp.zeros((50, 2), jnp.uint32))
    np.testing.assert_array_equal(made.token, at.min(axis=1))


@forms
@pytest.mark.parametrize("V", WIDTHS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_what_is_not_finite_stays_in_its_row(rng, form, V, temperature):
    z, _, keys = arguments(rng, V)
    t = jnp.full(7, temperature)
    clean, others, at = form(z, t, keys), np.arange(7) != 3, int(rng.integers(V))
    for value in (np.nan, np.inf):
        made = form(z.at[3, at].set(value), t, keys)
        assert made.token[3] == (at if value == np.inf and temperature == 0 else 0)
        assert not np.isfinite(made.total[3])
        assert equal(take(made, others), take(clean, others))
    made = form(z.at[3].set(-np.inf), t, keys)  # a grammar that allows nothing
    assert made.token[3] == 0
    assert made.total[3] == -np.inf
    assert equal(take(made, others), take(clean, others))
    made = form(z.at[3].set(-np.inf).at[3, at].set(2.5), t, keys)  # and one that allows one token
    assert (made.token[3], made.total[3], made.warm[3]) == (at, np.float32(2.5), 0)


def test_a_row_s_bits_do_not_depend_on_how_many_rows_there_are(rng):
    args = arguments(rng, 4099, R=33)  # more than one thread takes at once
    whole = kernel(*args)
    for R in (1, 2, 8, 13, 32):
        at = rng.permutation(33)[:R]
        assert equal(kernel(*(x[at] for x in args)), take(whole, at))


def test_rows_that_are_not_in_use_are_not_read(rng):
    z, temperature, keys = arguments(rng, 97, R=9)
    whole = kernel(z, temperature, keys)
    for rows in (0, 1, 8, 9, 10, -1):
        live = min(max(rows, 0), 9)
        made = kernel(z.at[live:].set(np.nan), temperature, keys, jnp.int32(rows))
        assert equal(take(made, slice(live)), take(whole, slice(live))), rows
        assert not any(x.any() for x in take(made, slice(live, 9))), rows


@pytest.mark.bits
def test_auto_is_the_kernel_on_one_cpu_and_xla_elsewhere(rng):
    args, auto = arguments(rng, 97), jax.jit(draw)
    assert equal(auto(*args), kernel(*args))
    assert "mint_draw" in auto.lower(*args).as_text()
    assert "mint_draw" not in auto.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    half = args[0].astype(jnp.bfloat16), *args[1:]
    assert "logits in bfloat16" in dict(dispatch.explain(DRAW, *half))["cpu"]
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        assert "divides rows" in dict(dispatch.explain(DRAW, *args))["cpu"]
        assert "mint_draw" not in jax.jit(draw).lower(*args).as_text()
        with pytest.raises(ValueError, match="choose auto or one of: xla"):
            draw(*args, implementation="cpu")
