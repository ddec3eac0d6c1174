"""Training curves: the loss and the gradient norm of each policy at every update, for charts."""

import concurrent.futures
import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.training_calls import Call, ForwardBackward, Optim

MOST = 1000  # points of a chart
WAIT_S = 10.0  # for the newest points
_INSERT = """INSERT INTO points
    SELECT ?1, 1 + COALESCE(MAX(number), 0), ?2, ?3, ?4 FROM points WHERE model = ?1"""


class Point(NamedTuple):
    """One update: the loss of a target before it and the gradient's norm; None if not finite."""

    at: float
    loss: float | None
    grad_norm: float | None


class Curves:
    """The curves of one server. ``clock`` gives seconds since 1970."""

    def __init__(self, database: ServerDatabase, clock: Callable[[], float]):
        self._database, self._clock = database, clock
        # since a policy's last update: summed loss and summed weights
        self._sums: dict[str, tuple[float, float]] = {}
        self._newest: concurrent.futures.Future[Any] | None = None

    def record(self, model: str, call: Call, result: Any) -> None:
        """Records the result of a request; called by one thread, in the order of the requests."""
        if isinstance(call, ForwardBackward) and call.backward:
            loss, weight = self._sums.get(model, (0.0, 0.0))
            weight += sum(float(np.abs(datum.weights).sum()) for datum in call.data)
            self._sums[model] = loss + result.loss, weight
        elif isinstance(call, Optim):
            loss, weight = self._sums.pop(model, (0.0, 0.0))
            values = loss / weight if weight else math.nan, result["grad_norm"]
            row = model, self._clock(), *(float(x) if math.isfinite(x) else None for x in values)
            with contextlib.suppress(DatabaseFailed):  # closed: no chart is worth a failed update
                self._newest = self._database.write(
                    lambda c: c.execute(_INSERT, row).rowcount, keep=True, lazy=True
                )

    def of(self, model: str, most: int = MOST) -> list[tuple[int, Point]]:
        """Returns a policy's updates by number, thinned to at most ``most`` and the last one."""
        if self._newest is not None and not self._database.trouble:  # a full disk delays points
            concurrent.futures.wait([self._newest], WAIT_S)
        [[last]] = self._database.read("SELECT MAX(number) FROM points WHERE model = ?", model)
        query = "SELECT number, at, loss, grad_norm FROM points WHERE model = ?"
        query += " AND (number % ? = 0 OR number = ?) ORDER BY number"
        rows = self._database.read(query, model, max(1, -(-(last or 0) // most)), last)
        return [(number, Point(*point)) for number, *point in rows]
