"""Draws names of requests: uniform, by Zipf's law, or in bursts of sessions."""

import numpy as np

from mint_jax.errors import choice

KINDS = ("uniform", "zipf", "bursts")
SESSIONS, REQUESTS = 64, 32  # of bursts: open at once, and requests of one


class Zipf:
    """Draws of ``n`` things by Zipf's law, the popular ones spread over all of them."""

    def __init__(self, n: int, exponent: float, rng: np.random.Generator):
        self._cumulative = np.cumsum(np.arange(1, n + 1, dtype=np.float64) ** -exponent)
        self._order, self._rng = rng.permutation(n), rng

    def draw(self, count: int) -> np.ndarray:
        ranks = np.searchsorted(self._cumulative, self._rng.random(count) * self._cumulative[-1])
        return self._order[ranks]


def draws(kind: str, n: int, count: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """Returns the names of ``count`` requests, ``[count]`` below ``n``. With ``bursts`` a request
    is of one of ``SESSIONS`` open sessions, each of a name drawn uniformly, which ends after
    ``REQUESTS``.
    """
    if kind == "uniform":
        return rng.integers(0, n, count)
    if kind == "zipf":
        return Zipf(n, exponent, rng).draw(count)
    if kind != "bursts":
        raise choice("traffic", kind, KINDS)
    names, left = rng.integers(0, n, SESSIONS), rng.integers(1, REQUESTS + 1, SESSIONS)
    out = np.empty(count, np.int64)
    for k, session in enumerate(rng.integers(0, SESSIONS, count).tolist()):
        out[k] = names[session]
        left[session] -= 1
        if not left[session]:
            names[session], left[session] = rng.integers(0, n), REQUESTS
    return out
