"""A token of heads whose memory is a state, by the kernel for CPUs and by XLA: float64, slots, a
neighbour that is not finite, bits of rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.state_step import cpu, xla

kernel, by_xla = (jax.jit(form.step, static_argnames="corrects") for form in (cpu, xla))
L, S, N = 2, 7, 2
# empty, to another slot, in its slot, not kept; the last row's state is not finite
LOAD, SAVE = np.array([[-1, 3, 2, 0, 5], [4, 1, 2, S, 6]], np.int32)


def arguments(rng, K, V, channels):
    rows = [rng.normal(size=(len(LOAD), N, *n)) for n in ((K,), (K,), (V,))]
    decay = -rng.exponential(size=(len(LOAD), N, K if channels else 1))
    pool = rng.normal(size=(L, S, N, K, V))
    pool[1, 5] = np.nan
    rows += [decay, rng.uniform(size=(len(LOAD), N)), pool]
    return [jnp.asarray(x, jnp.float32) for x in rows]


@pytest.mark.parametrize("form", [kernel, by_xla], ids=["cpu", "xla"])
@pytest.mark.parametrize(
    ("K", "V", "channels", "corrects"),
    [(5, 16, False, True), (8, 80, True, True), (8, 144, False, False)],
)
def test_values_are_those_of_float64(rng, form, K, V, channels, corrects):
    args = arguments(rng, K, V, channels)
    made, after = map(np.array, form(*args, jnp.int32(1), LOAD, SAVE, corrects=corrects))
    q, k, v, decay, beta, pool = (np.array(x, np.float64) for x in args)
    old = np.where((LOAD < 0)[:, None, None, None], 0, pool[1, LOAD]) * np.exp(decay)[..., None]
    v = v - np.einsum("bnk,bnkv->bnv", k, old) if corrects else v
    new = old + np.einsum("bnk,bnv,bn->bnkv", k, v, beta)
    # sums of K products in float32
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(made, np.einsum("bnk,bnkv->bnv", q, new))
    kept = SAVE < S
    close(after[1, SAVE[kept]], new[kept])
    others = np.delete(np.arange(S), SAVE[kept])
    assert after[0].tobytes() == np.array(args[-1][0]).tobytes()
    assert after[1, others].tobytes() == np.array(args[-1][1, others]).tobytes()


def test_a_row_s_bits_are_its_own(rng):
    args = arguments(rng, 8, 80, False)
    made, after = kernel(*args, jnp.int32(1), LOAD, SAVE, corrects=True)
    for b in range(4):
        one = *(x[b : b + 1] for x in args[:-1]), args[-1], jnp.int32(1)
        alone, pool = kernel(*one, LOAD[b : b + 1], SAVE[b : b + 1], corrects=True)
        assert np.array(alone[0]).tobytes() == np.array(made[b]).tobytes()
        if SAVE[b] < S:
            assert np.array(pool[1, SAVE[b]]).tobytes() == np.array(after[1, SAVE[b]]).tobytes()
