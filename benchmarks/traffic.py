"""Draws names of requests: uniform, by Zipf's law, or in bursts of sessions."""

import numpy as np

from mint_jax.errors import choice

KINDS = ("uniform", "zipf", "bursts")
SESSIONS, REQUESTS = 64, 32  # of bursts: open at once, and requests of one


def draws(kind: str, n: int, count: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """Returns the names of ``count`` requests, ``[count]`` below ``n``. With ``bursts`` a request
    is of one of ``SESSIONS`` open sessions, each of a name drawn uniformly, which ends after
    ``REQUESTS``.
    """
    if kind == "uniform":
        return rng.integers(0, n, count)
    if kind == "zipf":  # the popular ones spread over all of them
        cumulative, order = np.cumsum(np.arange(1.0, n + 1) ** -exponent), rng.permutation(n)
        return order[np.searchsorted(cumulative, rng.random(count) * cumulative[-1])]
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
