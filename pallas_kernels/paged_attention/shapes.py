"""Shapes of real models, for tests and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call on one device."""

    rows: int  # rows that decode, teams, or blocks of prefill
    heads: int  # kv heads
    # queries of a kv head: heads of its group, times rows of a team or tokens of a block
    queries: int
    head_dim: int  # this and width: of queries, and of keys in the pool
    width: int
    positions: int  # capacity of a table
    dtype: str = "bfloat16"  # dtype of queries and pool


# Qwen3-30B-A3B (32 heads over 4), Qwen3-4B (32 over 8), SmolLM2-135M (9 over 3, of 64); shapes with
# one kv head are one device's share of several.
DECODE = (
    Shape(128, 4, 8, 128, 128, 8192),
    Shape(8, 4, 8, 128, 128, 32768),
    Shape(32, 8, 4, 128, 128, 32768),
    Shape(128, 1, 8, 128, 128, 32768),
    Shape(256, 1, 8, 128, 128, 131072),  # tables are four times a core's scalar memory
    Shape(32, 3, 3, 64, 128, 8192),
    Shape(32, 3, 3, 64, 128, 8192, "float32"),
    Shape(7, 4, 8, 128, 128, 8192, "float32"),
)
TEAMS = (
    Shape(16, 4, 8 * 8, 128, 128, 8192),
    Shape(4, 8, 4 * 8, 128, 128, 32768),
    Shape(4, 3, 3 * 8, 64, 128, 8192),
)
PREFILL = (
    Shape(16, 4, 8 * 32, 128, 128, 8192),
    Shape(16, 8, 4 * 32, 128, 128, 32768, "float32"),
    Shape(16, 3, 3 * 32, 64, 128, 8192),
)
