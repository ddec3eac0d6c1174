"""Shapes of real models, for tests and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call on one device, which has all heads of its rows."""

    rows: int  # rows that decode, teams, or blocks of prefill
    queries: int  # heads, times rows of a team or tokens of a block
    positions: int  # capacity of a table
    latent: int = 512  # this and rope, width: dimensions, and those of rotary keys in the pool
    rope: int = 64
    width: int = 128
    dtype: str = "bfloat16"  # dtype of queries and pool


# Kimi-K2 has 64 heads, DeepSeek-V3 128.
DECODE = (Shape(128, 64, 8192), Shape(8, 128, 32768), Shape(32, 64, 32768, dtype="float32"))
TEAMS = (Shape(16, 64 * 8, 8192), Shape(4, 128 * 8, 32768))
PREFILL = (Shape(16, 64 * 32, 8192), Shape(4, 128 * 32, 32768))
