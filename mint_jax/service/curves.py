"""Training curves: the loss and the gradient norm of each policy at every update, for charts.

The device thread records each request as it ends; the server writes new points every few seconds.
A crash loses the points since then: charts have a gap, and nothing else depends on them.
"""

import collections
import math
import threading

import numpy as np

from mint_jax.service.book import Book, Point
from mint_jax.service.calls import Call, ForwardBackward, Optim

MOST = 1000  # points of a chart


class Curves:
    """See the module; may be called from any thread.

    Args:
        book: keeps them, and gives the time.
    """

    def __init__(self, book: Book):
        self._book = book
        self._lock = threading.Lock()
        # since a policy's last update: summed loss and summed weights
        self._sums: dict[str, tuple[float, float]] = {}
        self._new: collections.defaultdict[str, list[Point]] = collections.defaultdict(list)

    def record(self, model: str, call: Call, result: object) -> None:
        """Records the result of a request; called in the order of a policy's requests."""
        if isinstance(call, ForwardBackward) and call.backward:
            weight = sum(float(np.abs(datum.weights).sum()) for datum in call.data)
            with self._lock:
                before = self._sums.get(model, (0.0, 0.0))
                self._sums[model] = before[0] + result.loss, before[1] + weight  # type: ignore[attr-defined]
        elif isinstance(call, Optim):
            with self._lock:
                loss, weight = self._sums.pop(model, (0.0, 0.0))
                mean = loss / weight if weight else math.nan
                self._new[model].append(
                    Point(self._book.clock(), _finite(mean), _finite(result["grad_norm"]))  # type: ignore[arg-type]
                )

    def flush(self) -> None:
        """Writes new points. What cannot be written is tried again by the next call."""
        with self._lock:
            new, self._new = self._new, collections.defaultdict(list)
        if not new:
            return
        try:
            self._book.add_points(new)
        except BaseException:
            with self._lock:
                for model, points in new.items():
                    self._new[model] = points + self._new[model]
            raise

    def of(self, model: str) -> list[tuple[int, Point]]:
        """Returns the numbers and points of a policy's updates, at most ``MOST`` and the last."""
        self.flush()
        return self._book.points(model, MOST)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
