"""How the training of each policy goes: its loss and its gradient's norm at every update, for
charts.

The thread that owns the devices tells of each request as it ends, which costs it some additions;
the server writes down what is new every few seconds. A crash takes the points since then: charts
have a gap there, and nothing else depends on them.
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
        book: keeps them; its clock dates them.
    """

    def __init__(self, book: Book):
        self._book = book
        self._lock = threading.Lock()
        # since a policy's last update: its loss, and the weights that it is a sum over
        self._sums: dict[str, tuple[float, float]] = {}
        self._new: collections.defaultdict[str, list[Point]] = collections.defaultdict(list)

    def heard(self, model: str, call: Call, result: object) -> None:
        """A request of a policy has ended with this result; requests of one policy come in their
        order.
        """
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
        """Writes down what is new; what could not be written is tried again with the next."""
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
        """The numbers of a policy's updates and what is known of each, at most ``MOST`` and the
        last.
        """
        self.flush()
        return self._book.points(model, MOST)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
