"""Few shapes instead of many compilations: sizes are rounded up to a short list, and a shape seen
before is preferred.
"""

import math


def round_up(n: int, least: int = 1) -> int:
    """``n`` rounded up by at most an eighth (exact up to 8, then 9, 10, ... 16, 18, 20, ... 32, 36,
    ...), at least ``least``.
    """
    n = max(n, least, 1)
    step = max(1, 1 << (n - 1).bit_length() >> 4)
    return -(-n // step) * step


class ShapeBook:
    """Remembers the shapes in use, and reuses one that fits with at most ``waste`` times the
    elements of the rounded sizes.
    """

    def __init__(self, waste: float = 1.3):
        self.waste = waste
        self.seen: list[tuple[int, ...]] = []

    def fit(self, needed: tuple[int, ...], least: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A shape no smaller than ``needed`` in any dimension: one seen before, or a new one of
        rounded sizes.
        """
        fresh = tuple(round_up(n, m) for n, m in zip(needed, least or (1,) * len(needed)))
        fitting = [
            s for s in self.seen if len(s) == len(needed) and all(a >= b for a, b in zip(s, needed))
        ]
        best = min(fitting, key=math.prod, default=None)
        if best is not None and math.prod(best) <= self.waste * math.prod(fresh):
            return best
        self.seen.append(fresh)
        return fresh
