"""Shapes of real models, for tests and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call: B rows of T tokens, K kv heads of G query heads, H wide keys and V wide values,
    and the positions of a window.
    """

    B: int
    K: int
    G: int
    T: int
    H: int
    V: int
    dtype: str = "bfloat16"
    window: int | None = None


TRAIN = (
    Shape(4, 8, 4, 4096, 128, 128),  # Qwen3-4B
    Shape(4, 4, 8, 2048, 128, 128),  # Qwen3-30B-A3B
    Shape(2, 3, 3, 1024, 64, 64),  # SmolLM2-135M
    Shape(1, 8, 1, 4096, 192, 128),  # Kimi-K2, a device's heads of 64 over eight
    Shape(1, 8, 4, 32768, 128, 128),
    Shape(2, 4, 8, 1000, 128, 128, "float32"),
    Shape(2, 8, 8, 4096, 64, 64, window=128),  # gpt-oss-20b
)
