"""Measured step times of each shape, by which live training chooses shapes.

A shape that looks slow is not chosen, and so not measured again: a single slow measurement must not
decide.
"""

import collections
import statistics
import time
from collections.abc import Callable

from mint_jax.train.config import BlockShape

KEPT = 5  # measurements per shape
# An unmeasured shape is assumed to take this fraction of what its tokens take in other shapes, so
# that it is tried when a step would fill it.
HOPE = 0.8
# Seconds after which a shape's measurements are no longer trusted.
STALE_S = 60.0

Key = tuple[BlockShape, bool]


class StepTimes:
    """Seconds of a step by shape, for forward passes and for forward and backward passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._measured: dict[Key, collections.deque[float]] = {}
        self._last: dict[Key, float] = {}

    def add(self, shape: BlockShape, backward: bool, seconds: float) -> None:
        self._measured.setdefault((shape, backward), collections.deque(maxlen=KEPT)).append(seconds)
        self._last[shape, backward] = self._clock()

    def seconds(self, shape: BlockShape, backward: bool) -> float:
        """Returns the expected seconds of a step: the lower median of its last measurements.

        If they are stale: the smaller of the fastest one and a per-token estimate from other
        shapes. For an unmeasured shape ``HOPE`` times that estimate, or its number of tokens.
        """
        own = self._measured.get((shape, backward))
        if own is not None and self._fresh((shape, backward)):
            return statistics.median_low(own)
        keys = [key for key in self._measured if key[1] == backward and key != (shape, backward)]
        keys = list(filter(self._fresh, keys)) if own is not None else keys
        if not keys:
            return min(own or [float(shape.size)])
        seconds = sum(statistics.median_low(self._measured[key]) for key in keys)
        by_tokens = shape.size * seconds / sum(key[0].size for key in keys)
        return HOPE * by_tokens if own is None else min(*own, by_tokens)

    def _fresh(self, key: Key) -> bool:
        return self._clock() - self._last[key] <= STALE_S
