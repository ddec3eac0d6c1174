"""Lower bounds on the cost of a call from its shapes and, if given, the factors of its rows.

Bytes count what any implementation must move: each row read once, each result written once (and
read, if added to), every distinct factor and expert's matrix once. A multiply-add is two
operations.

Axes: M rows, D in, F out, R rank, W factors, K projections of the same rows, E experts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

TILE = 128  # rows of a TPU kernel's matmul
COLUMNS = 128  # columns of a chunk of adapters: eight of rank 16, see ``packed_lora.pallas_tpu``


class Cost(NamedTuple):
    """Cost of one call."""

    flops: int  # operations
    rows: int  # bytes of rows, results and their gradients
    weights: int  # bytes of factors or matrices, and of their gradients

    @property
    def nbytes(self) -> int:
        """Total bytes that must move."""
        return self.rows + self.weights

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(current + theirs for current, theirs in zip(self, other)))


def packed_lora(
    x: Any,
    a: Sequence[Any],
    b: Sequence[Any],
    onto: Sequence[Any],
    factor: Any = None,
    backward: bool = False,
) -> Cost:
    """Returns the cost of ``packed_lora`` or its gradients; ``factor [M]`` is concrete."""
    (M, D), (W, R) = x.shape, a[0].shape[:2]
    if factor is None:
        present = min(M, W)
    else:
        factor = np.asarray(factor)
        M, present = int(np.sum(factor >= 0)), len(np.unique(factor[factor >= 0]))
    widths = [y.shape[1] for y in onto]
    size_x, size_y, size_w = (np.dtype(one.dtype).itemsize for one in (x, onto[0], a[0]))
    weights = present * R * sum(D + F for F in widths) * size_w
    if backward:  # matmuls of h, and of the gradients of h, x, a and b
        flops = sum(2 * M * R * (3 * D + 2 * F) for F in widths)
        return Cost(flops, M * (3 * D * size_x + sum(widths) * size_y), 2 * weights)
    return Cost(
        sum(2 * M * R * (D + F) for F in widths),
        M * (D * size_x + 2 * sum(widths) * size_y),
        weights,
    )


def grouped(x: Any, w: Sequence[Any], sizes: Any = None, backward: bool = False) -> Cost:
    """Returns the cost of the base's grouped matmuls, or of the rows' gradients."""
    M, D = x.shape
    if sizes is None:
        present = min(M, w[0].shape[0])
    else:
        M, present = int(np.sum(sizes)), int(np.count_nonzero(sizes))
    widths = [one.shape[2] for one in w]
    size_x, size_w = np.dtype(x.dtype).itemsize, np.dtype(w[0].dtype).itemsize
    return Cost(
        sum(2 * M * D * F for F in widths),
        M * (D + sum(widths)) * size_x,
        present * D * sum(widths) * size_w,
    )


def packed_matmul(
    x: Any,
    w: Sequence[Any],
    a: Sequence[Any],
    b: Sequence[Any],
    sizes: Any = None,
    factor: Any = None,
) -> Cost:
    """Returns the cost of base and adapters in one pass, see ``grouped`` and ``packed_lora``."""
    onto = [jax.ShapeDtypeStruct((x.shape[0], one.shape[2]), x.dtype) for one in w]
    return grouped(x, w, sizes) + packed_lora(x, a, b, onto, factor)._replace(rows=0)


# Weight tiles of a TPU's matrix unit cost the same whether a matmul fills them or not. Within the
# base's matmul only the factors' bytes are extra, ``Cost.weights``.
def passes(d_in: int, d_out: int, unit: int, rows: int = TILE) -> int:
    """Returns rows times weight tiles of a matmul ``[rows, d_in] [d_in, d_out]``."""
    return rows * -(-d_in // unit) * -(-d_out // unit)


def packed_lora_passes(
    factor: Any, rank: int, d_in: int, d_out: Sequence[int], unit: int, tile: int = TILE
) -> int:
    """Returns the passes of the forward matmuls of all tiles, in chunks of ``COLUMNS`` / R
    adapters.

    ``unit``: width of a chip's matrix unit, 128 (v5e, v5p) or 256 (v6e, TPU7x).
    """
    factor, chunk = np.asarray(factor), 1 << max(0, (COLUMNS // rank).bit_length() - 1)

    def of_chunk(adapters: int) -> int:
        n = adapters * rank
        return passes(d_in, n * len(d_out), unit, tile) + sum(
            passes(n, F, unit, tile) for F in d_out
        )

    total = 0
    for at in range(0, len(factor), tile):
        present = len(np.unique(factor[at : at + tile][factor[at : at + tile] >= 0]))
        total += present // chunk * of_chunk(chunk) + (
            of_chunk(present % chunk) if present % chunk else 0
        )
    return total
