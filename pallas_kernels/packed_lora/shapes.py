"""Shapes of real models, for tests, tuning and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call."""

    rows: int  # this and d_in, d_out: sizes of the call; one output width for each projection
    d_in: int
    d_out: tuple[int, ...]
    rank: int  # rank of the adapters
    factors: int  # adapters times experts of one device
    dtype: str = "bfloat16"  # dtype of rows and factors


# Qwen3-30B-A3B (2048 x 768, 128 experts) and Kimi-K2 (7168 x 2048, 384 experts, of which a device
# of 32 has 12).
DECODE = (
    Shape(512, 2048, (768, 768), 16, 128 * 8),
    Shape(512, 768, (2048,), 16, 128 * 8),
    Shape(8192, 2048, (768, 768), 16, 128 * 64),
    Shape(256, 7168, (2048, 2048), 16, 12 * 16),
    Shape(256, 2048, (7168,), 16, 12 * 16),
    Shape(512, 2048, (768, 768), 2, 128 * 8),
    Shape(512, 2048, (768, 768), 256, 128),
    Shape(512, 2048, (768, 768), 1, 128 * 8, "float32"),
    Shape(512, 2048, (768, 768), 1, 128 * 8),
    Shape(512, 2048, (768, 768), 24, 128 * 8),
    Shape(512, 2048, (768, 768), 1, 384 * 1024),
)
TRAIN = (
    Shape(16384, 2048, (768, 768), 16, 128 * 8),
    Shape(16384, 768, (2048,), 16, 128 * 8),
    Shape(16384, 7168, (2048, 2048), 16, 12 * 16),
    Shape(16384, 2048, (7168,), 16, 12 * 16),
    Shape(16384, 2048, (768, 768), 4, 128 * 8),
    Shape(16384, 2048, (768, 768), 128, 128),
    Shape(16384, 2048, (768, 768), 24, 128 * 8),
    Shape(16384, 2048, (768, 768), 1, 128 * 8),
)
