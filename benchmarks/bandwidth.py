"""Measures memory bandwidth by reading an array much larger than the caches."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

WIDTH = 1024
TRIES = 5


class Bandwidth:
    """A side of ``timing.in_turn``: bytes per second that the machine can read or
    copy meanwhile.

    Three ways are tried, the fastest one is used: a sum, a product with two columns, whose weights
    are read as a decoding step reads its own, and a copy, whose bytes count twice.

    Attributes:
        way: which was the fastest.
        nbytes: that one call moves.
    """

    def __init__(self, nbytes: int):
        x_ND = jnp.ones((max(1, nbytes // (4 * WIDTH)), WIDTH), jnp.float32)
        v_DM = jnp.ones((WIDTH, 2), jnp.float32)
        ways: dict[str, tuple[int, Callable[[Any], Any]]] = {
            "sum": (x_ND.nbytes, jax.jit(jnp.sum)),
            "product": (x_ND.nbytes, jax.jit(lambda x: x @ v_DM)),
            "copy": (2 * x_ND.nbytes, jax.jit(lambda x: x + 1)),
        }
        self._x = x_ND
        self.rates = {name: size / _seconds(fn, x_ND) for name, (size, fn) in ways.items()}
        self.way = max(self.rates, key=lambda name: self.rates[name])
        self.nbytes, self._move = ways[self.way]

    def __call__(self) -> None:
        jax.block_until_ready(self._move(self._x))


def _seconds(fn: Callable[[Any], Any], x: jax.Array) -> float:
    """The shortest of some calls."""
    jax.block_until_ready(fn(x))
    out = []
    for _ in range(TRIES):
        began = time.perf_counter()
        jax.block_until_ready(fn(x))
        out.append(time.perf_counter() - began)
    return min(out)
