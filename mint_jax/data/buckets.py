"""Shape buckets: sizes are rounded up and shapes reused, so that few programs are compiled."""

import math


def round_up(n: int, least: int = 1) -> int:
    """Returns ``n`` rounded up by at most an eighth: 1, 2 ... 16, 18, 20 ... 32, 36 ..."""
    n = max(n, least, 1)
    step = max(1, 1 << (n - 1).bit_length() >> 4)
    return -(-n // step) * step


class ShapeBook:
    """Known shapes; one is reused up to ``waste`` times the elements of the rounded sizes."""

    def __init__(self, waste: float = 1.3):
        self.waste = waste
        self.shapes: list[tuple[int, ...]] = []

    def fit(self, needed: tuple[int, ...], least: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Returns a shape at least ``needed`` in every dimension: a known one, or rounded sizes."""
        fresh = tuple(round_up(n, m) for n, m in zip(needed, least or (1,) * len(needed)))
        fitting = [
            s
            for s in self.shapes
            if len(s) == len(needed) and all(a >= b for a, b in zip(s, needed))
        ]
        best = min(fitting, key=math.prod, default=None)
        if best is not None and math.prod(best) <= self.waste * math.prod(fresh):
            return best
        self.shapes.append(fresh)
        return fresh
