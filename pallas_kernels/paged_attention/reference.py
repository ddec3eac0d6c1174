"""Grouped-query attention to a paged cache row by row in float64, the oracle of the other forms."""

from typing import Any

import numpy as np

from pallas_kernels.paged import PAGE, RUN, Rows
from pallas_kernels.partial import MASKED


def positions(prefix: int, own: int, first: int) -> np.ndarray:
    """Returns the positions of a row's tokens from the run ``first`` on in its table's pages."""
    begin = -(-prefix // RUN) * RUN
    at = np.concatenate([np.arange(prefix), begin + np.arange(own)])
    return at[at >= first * RUN]


def softmax(s: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the parts of a softmax over scores ``[M, S]`` and its sum of values ``[S, V]``."""
    if not s.shape[1]:
        return np.full((len(s), 1), MASKED), np.zeros((len(s), 1)), np.zeros((len(s), v.shape[1]))
    top = s.max(1, keepdims=True)
    p = np.exp(s - top)
    return top, p.sum(1, keepdims=True), p @ v


def paged_attention(q: Any, k: Any, v: Any, rows: Rows, scale: float) -> list[np.ndarray]:
    """Implements ``paged_attention.paged_attention``."""
    layer, table, prefix, own, first = rows
    q, (k, v) = np.array(q, np.float64), (np.array(x[layer], np.float64) for x in (k, v))
    table, (B, K, M, H) = np.asarray(table), q.shape
    out = [np.zeros((B, K, M, n)) for n in (1, 1, H)]
    for b in range(B):
        at = positions(int(prefix[b]), int(own[b]), int(first[b]))
        page = table[b, at // PAGE]
        for h in range(K):
            keys, values = (x[page, h, at % PAGE, :H] for x in (k, v))
            for one, part in zip(out, softmax(q[b, h] @ keys.T * scale, values)):
                one[b, h] = part
    return out
