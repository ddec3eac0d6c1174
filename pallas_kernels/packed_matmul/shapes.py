"""Shapes of real models, for tests: Qwen3-30B-A3B (2048 x 768, 128 experts), whole or on one of
eight devices.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call."""

    rows: int  # this and d_in, d_out: sizes of the call; one output width for each projection
    d_in: int
    d_out: tuple[int, ...]
    experts: int  # experts of one device
    rank: int = 16  # rank of the adapters
    adapters: int = 8  # adapters of each expert


SHAPES = (
    Shape(16384, 2048, (768, 768), 128),
    Shape(16384, 768, (2048,), 128),
    Shape(512, 2048, (768, 768), 128, adapters=64),
    Shape(16384, 2048, (768, 768), 16, rank=128, adapters=2),
    Shape(16384, 2048, (768, 768), 128, rank=24),
)
