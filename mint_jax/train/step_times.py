"""What a step of each shape takes, as measured: the figures that shapes are chosen by.

A shape that looks slow is not chosen, and what is not chosen is not measured. So no single
measurement decides: a moment in which the machine did something else would keep a shape from being
chosen for good. When the last measurement alone counted, 8 blocks of 32 tokens of SmolLM2 stood at
1.5 s at the end of one run of the service's bench and at 0.57 at the end of another.
"""

import collections
import statistics
import time
from collections.abc import Callable, Iterator

from mint_jax.train.config import BlockShape

KEPT = 5  # measurements of a shape
# of what a shape's tokens take in others, while it was never run: it is tried where a step would be
# full
HOPE = 0.8
# without a measurement, after which a shape's own say nothing about today's machine any more
STALE_S = 60.0

Key = tuple[BlockShape, bool]


class StepTimes:
    """Seconds of a step by shape, forward alone and with its backward pass.

    Args:
        clock: seconds; a test's own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._measured: dict[Key, collections.deque[float]] = {}
        self._last: dict[Key, float] = {}

    def add(self, shape: BlockShape, backward: bool, seconds: float) -> None:
        """A step's time, now."""
        self._measured.setdefault((shape, backward), collections.deque(maxlen=KEPT)).append(seconds)
        self._last[shape, backward] = self._clock()

    def seconds(self, shape: BlockShape, backward: bool) -> float:
        """What a step should take.

        The lower median of the last ``KEPT``; of a shape that was not measured for ``STALE_S``, the
        least of these and of what its tokens take in the shapes that were, so that once in that
        time it may be tried again. Of one that never was, ``HOPE`` of what its tokens take in
        others, or their number where nothing was measured.
        """
        own = self._measured.get((shape, backward))
        if own is not None and self._fresh((shape, backward)):
            return statistics.median_low(own)
        others = [key for key in self._measured if key[1] == backward and key != (shape, backward)]
        others = list(filter(self._fresh, others)) if own is not None else others
        known = [(key[0].size, statistics.median_low(self._measured[key])) for key in others]
        by_tokens = (
            [shape.size * sum(s for _, s in known) / sum(n for n, _ in known)] if known else []
        )
        if own is None and by_tokens:
            return HOPE * by_tokens[0]
        return min([*(own or ()), *by_tokens], default=float(shape.size))

    def _fresh(self, key: Key) -> bool:
        return self._clock() - self._last[key] <= STALE_S

    def __iter__(self) -> Iterator[tuple[BlockShape, bool, float]]:
        """Of each that was measured its shape, whether it is backward, and ``seconds``."""
        return (
            (shape, backward, self.seconds(shape, backward))
            for shape, backward in list(self._measured)
        )
