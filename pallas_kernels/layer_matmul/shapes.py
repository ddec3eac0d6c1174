"""Shapes of real models' dense projections in decoding, for tests and benchmarks: Qwen3-4B with
1 to 256 rows. Matrices of the same rows (queries, keys and values; gate and up) are one call.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    """Rows times one layer of every stack, in bfloat16."""

    rows: int  # M
    d_in: int  # D
    d_outs: tuple[int, ...]  # F of each stack
    layers: int = 36  # L
    stored: str = "bfloat16"  # dtype of the stacks


GATE_UP, DOWN = (2560, (9728, 9728)), (9728, (2560,))
QKV, OUT = (2560, (4096, 1024, 1024)), (4096, (2560,))

SHAPES = (
    *(Shape(rows, *of) for rows in (64, 8, 1) for of in (GATE_UP, DOWN, QKV, OUT)),
    *(Shape(256, *of) for of in (GATE_UP, DOWN)),
    Shape(64, *GATE_UP, 36, "int8"),
    Shape(64, *DOWN, 36, "float8_e4m3fn"),
)
