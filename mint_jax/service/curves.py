"""Training curves: the loss and the gradient norm of each policy at every update, for charts.

The devices' thread records each request as it ends; the server writes new points every few seconds.
A crash loses the points since then: charts have a gap, and nothing else depends on them.
"""

import collections
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mint_jax.service.server_db import Connection, ServerDatabase
from mint_jax.service.training_calls import Call, ForwardBackward, Optim

MOST = 1000  # points of a chart


class Point(NamedTuple):
    """One update of a policy: the loss of a target before it, None if unknown or not finite; the
    gradient's norm.
    """

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
                point = Point(self._clock(), _finite(mean), _finite(result["grad_norm"]))  # type: ignore[arg-type, index]
                self._new[model].append(point)

    def flush(self) -> None:
        """Writes new points. What cannot be written is tried again by the next call."""
        with self._lock:
            new, self._new = self._new, collections.defaultdict(list)
        if not new:
            return

        def apply(connection: Connection) -> None:
            for model, points in new.items():
                query = "SELECT COALESCE(MAX(number), 0) FROM points WHERE model = ?"
                start = connection.execute(query, (model,)).fetchone()[0] + 1
                rows = [(model, start + i, *point) for i, point in enumerate(points)]
                connection.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?)", rows)

        try:
            self._database.write(apply).result()
        except BaseException:
            with self._lock:
                for model, points in new.items():
                    self._new[model] = points + self._new[model]
            raise

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
