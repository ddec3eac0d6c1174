"""Shapes of real models' dense projections in decoding, for tests and benchmarks: Qwen3-4B with
1 to 256 rows.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    """Rows times one layer of a stack, in bfloat16.

    Attributes:
        rows: M.
        d_in, d_out: D and F.
        layers: L.
        stored: dtype of the stack.
    """

    rows: int
    d_in: int
    d_out: int
    layers: int = 36
    stored: str = "bfloat16"


SHAPES = (
    Shape(64, 2560, 9728),
    Shape(64, 9728, 2560),
    Shape(64, 2560, 4096),
    Shape(64, 2560, 1024),
    Shape(64, 4096, 2560),
    Shape(1, 2560, 4096),
    Shape(8, 2560, 9728),
    Shape(256, 2560, 9728),
    Shape(256, 9728, 2560),
    Shape(64, 2560, 9728, 36, "int8"),
    Shape(64, 9728, 2560, 36, "float8_e4m3fn"),
)
