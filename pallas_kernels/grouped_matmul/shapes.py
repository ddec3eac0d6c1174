"""Shapes of real models, for tests, tuning and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call."""

    rows: int  # this and d_in, d_out: sizes of the call
    d_in: int
    d_out: int
    groups: int  # experts of one device
    transposed: bool = False  # matrices are `[d_out, d_in]`, as in the rows' gradients
    dtype: str = "bfloat16"  # dtype of rows
    stored: str = "bfloat16"  # dtype of matrices


# Qwen3-30B-A3B (2048 x 768, 128 experts) and Kimi-K2 (7168 x 2048, 384 experts, of which a device
# of 32 has 12).
SHAPES = (
    Shape(512, 2048, 768, 128),
    Shape(512, 768, 2048, 128),
    Shape(256, 7168, 2048, 12),
    Shape(16384, 2048, 768, 128),
    Shape(16384, 768, 2048, 128),
    Shape(16384, 768, 2048, 128, transposed=True),
    Shape(16384, 2048, 768, 128, transposed=True),
    Shape(16384, 7168, 2048, 12),
    Shape(16384, 2048, 7168, 12, transposed=True),
    Shape(16384, 2048, 768, 128, stored="int8"),
    Shape(16384, 2048, 768, 128, stored="float8_e4m3fn"),
    Shape(16384, 2048, 768, 128, dtype="float32", stored="float32"),
    Shape(16384, 2048, 768, 128, dtype="float32", stored="bfloat16"),
)
