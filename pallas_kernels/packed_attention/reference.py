"""Attention of packed rows in float64, the oracle of the kernels."""

from typing import Any

import numpy as np


def attention(
    q: Any,
    k: Any,
    v: Any,
    own: Any,
    parent: Any,
    scale: float,
    window: int | None = None,
    position: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``[B, K, G, T, V]``, and the logarithms of the sums of weights ``[B, K, G, T]``."""
    p, lse = _weights(q, k, own, parent, scale, window, position)
    return np.einsum("bkgts,bksv->bkgtv", p, _wide(v)), lse


def gradients(
    q: Any,
    k: Any,
    v: Any,
    own: Any,
    parent: Any,
    scale: float,
    g: Any,
    window: int | None = None,
    position: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the gradients of q, k and v, where ``g [B, K, G, T, V]`` is the result's."""
    p, _ = _weights(q, k, own, parent, scale, window, position)
    q, k, v, g = _wide(q), _wide(k), _wide(v), _wide(g)
    dp = np.einsum("bkgtv,bksv->bkgts", g, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return (
        np.einsum("bkgts,bksh->bkgth", ds, k),
        np.einsum("bkgts,bkgth->bksh", ds, q),
        np.einsum("bkgts,bkgtv->bksv", p, g),
    )


def _weights(
    q: Any, k: Any, own: Any, parent: Any, scale: float, window: int | None, position: Any
) -> tuple[np.ndarray, np.ndarray]:
    own, parent = np.asarray(own), np.asarray(parent)
    T = own.shape[1]
    visible = (own[:, :, None] == own[:, None]) | (parent[:, :, None] == own[:, None])
    visible = visible & (np.arange(T)[:, None] >= np.arange(T)[None])
    if window is not None:
        visible &= np.asarray(position)[:, :, None] - np.asarray(position)[:, None] < window
    s = np.where(
        visible[:, None, None], np.einsum("bkgth,bksh->bkgts", _wide(q), _wide(k)) * scale, -np.inf
    )
    top = s.max(-1, keepdims=True)
    total = np.exp(s - top).sum(-1, keepdims=True)
    return np.exp(s - top) / total, (top + np.log(total))[..., 0]


def _wide(x: Any) -> np.ndarray:
    return np.array(x, np.float64)
