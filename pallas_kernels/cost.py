"""Lower bounds on the cost of a call from its shapes and, if given, the factors of its rows:
operations, bytes, passes.

Bytes count what any implementation must move: each row read once, each result written once (and
read, if added to), every distinct factor and every distinct expert's matrix once. Only factors
named by rows count, not the whole stacks. A multiply-add is two operations. Passes count weight
tiles of a TPU's matrix unit, 128 or 256 wide, which cost the same whether a matmul fills them or
not; an adapter of rank 16 fills 16 columns.

The adapters' part has two bounds. As a separate call (``packed_lora`` after the base) the rows move
once more, and ``Cost.nbytes`` counts. Within the base's matmul rows and results are already there,
and only ``Cost.weights`` is extra. Relative to the bytes of the base (its rows and its distinct
experts' matrices) for Qwen3-30B-A3B in bfloat16, with 8 distinct experts per token drawn uniformly,
gate, up and down, expected: (tokens, adapters, rank) -> within, separate

    64, 64, 16        +11.6 %  +12.4 %
    1,024, 8, 16      +21.1 %  +33.5 %
    1,024, 64, 16    +108.6 % +121.1 %
    1,024, 1,024, 1   +10.5 %  +23.0 %

Axes: M rows, D in, F out, R rank, W factors, K projections of the same rows, E experts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

TILE = 128  # rows of a TPU kernel's matmul
COLUMNS = 128  # columns of a chunk of adapters: eight of rank 16, see ``packed_lora.pallas_tpu``


class Cost(NamedTuple):
    """Cost of one call.

    Attributes:
        flops: operations.
        rows: bytes of rows, results and their gradients.
        weights: bytes of factors or matrices, and of their gradients.
    """

    flops: int
    rows: int
    weights: int

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
    """Returns the cost of ``packed_lora.packed_lora`` or its gradients; arguments need a shape and
    a dtype only.

    The backward pass reads x and the results' gradients, adds to the gradient of x, reads each
    present factor and writes its gradient. Zero gradients of absent factors are not counted.

    Args:
        x, a, b, onto: ``[M, D]``, ``[W, R, D]``, ``[W, R, F]`` and ``[M, F]`` of each projection.
        factor: ``[M]``, concrete; None assumes the maximum number of distinct factors.
    """
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
    """Returns the cost of the base's grouped matmuls of the same rows; backward is the gradient of
    the rows only, since the base is frozen.

    Args:
        x, w: ``[M, D]``, and ``[E, D, F]`` of each projection; results have the dtype of x.
        sizes: ``[E]`` rows of each expert, concrete; None assumes the maximum number of experts.
    """
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
    """Returns the cost of ``packed_matmul.packed_matmul``: base and adapters, with rows read and
    results written once.

    Args:
        x, w, a, b, sizes, factor: as in ``grouped`` and ``packed_lora``.
    """
    base = grouped(x, w, sizes)
    lora = packed_lora(
        x,
        a,
        b,
        [np.broadcast_to(np.zeros((), x.dtype), (x.shape[0], one.shape[2])) for one in w],
        factor,
    )
    return base + lora._replace(rows=0)


def passes(d_in: int, d_out: int, unit: int, rows: int = TILE) -> int:
    """Returns rows times weight tiles of a matmul ``[rows, d_in] [d_in, d_out]`` in a matrix unit
    ``unit`` wide.
    """
    return rows * -(-d_in // unit) * -(-d_out // unit)


def packed_lora_passes(
    factor: Any, rank: int, d_in: int, d_out: Sequence[int], unit: int, tile: int = TILE
) -> int:
    """Returns the passes of the forward matmuls of all tiles with adapters, in chunks of at most
    ``COLUMNS`` / R adapters.

    In the first matmul the columns of a chunk's adapters are adjacent for all projections; in the
    second each projection has its own factors, stacked.

    Args:
        factor: ``[M]``, concrete, as in ``packed_lora``.
        unit: width of a chip's matrix unit, 128 (v5e, v5p) or 256 (v6e, TPU7x).
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
