"""Training curves: the loss and the gradient norm of each policy at every update, for charts.

The server writes new points every few seconds; a crash loses those since then.
"""

import collections
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.training_calls import Call, ForwardBackward, Optim

MOST = 1000  # points of a chart


class Point(NamedTuple):
    """One update: the loss of a target before it and the gradient's norm; None if not finite."""

    at: float
    loss: float | None
    grad_norm: float | None


class Curves:
    """See the module; may be called from any thread. ``clock`` gives seconds since 1970."""

    def __init__(self, database: ServerDatabase, clock: Callable[[], float]):
        self._database, self._clock = database, clock
        self._lock = threading.Lock()
        # since a policy's last update: summed loss and summed weights
        self._sums: dict[str, tuple[float, float]] = {}
        self._new: collections.deque[tuple[str, Point]] = collections.deque()

    def record(self, model: str, call: Call, result: Any) -> None:
        """Records the result of a request; called in the order of a policy's requests."""
        if isinstance(call, ForwardBackward) and call.backward:
            weight = sum(float(np.abs(datum.weights).sum()) for datum in call.data)
            loss, before = self._sums.get(model, (0.0, 0.0))
            self._sums[model] = loss + result.loss, before + weight
        elif isinstance(call, Optim):
            loss, weight = self._sums.pop(model, (0.0, 0.0))
            mean = loss / weight if weight else math.nan
            point = Point(self._clock(), _finite(mean), _finite(result["grad_norm"]))
            self._new.append((model, point))

    def flush(self) -> None:
        """Writes new points. What cannot be written is tried again by the next call."""
        query = """INSERT INTO points SELECT
            ?1, 1 + COALESCE(MAX(number), 0), ?2, ?3, ?4 FROM points WHERE model = ?1"""
        with self._lock:
            rows = [(model, *point) for model, point in self._new.copy()]
            if rows:
                self._database.write(lambda c: c.executemany(query, rows)).result()
            for _ in rows:
                self._new.popleft()

    def of(self, model: str, most: int = MOST) -> list[tuple[int, Point]]:
        """Returns a policy's updates by number, thinned to at most ``most`` and the last one."""
        self.flush()
        [[last]] = self._database.read("SELECT MAX(number) FROM points WHERE model = ?", model)
        query = "SELECT number, at, loss, grad_norm FROM points WHERE model = ?"
        query += " AND (number % ? = 0 OR number = ?) ORDER BY number"
        rows = self._database.read(query, model, max(1, -(-(last or 0) // most)), last)
        return [(number, Point(*point)) for number, *point in rows]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
