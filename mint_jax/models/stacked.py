"""A sampler's frozen matrices as the whole stack of all layers: products begin at a layer, and
nothing is copied for it.

A scan over layers slices what it is given. On TPUs the slice is part of the product; on CPUs and
GPUs it is a copy of every layer in every step. So on one device the loop of a sampler closes over
the stacks and ``pallas_kernels.layer_matmul`` reads from where a layer lies. Training keeps the
scan's slices: many rows share one, and the gradient of the products is XLA's. A mesh keeps them
too: there XLA divides the products.

Axes: L layers, D in, F out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.layer_matmul import blocks, layer_matmul

# small, and in float32; absorbed into queries and values, by products of another shape
KEPT = ("router", "kv_b")


class LayerOf(NamedTuple):
    """One layer's matrix, in the place of ``w``.

    Attributes:
        stack: ``[L, D, F]``, or blocks ``[L, P, N, bytes]``, see ``stored.py``.
        layer: int32.
        kernel: which implementation of ``layer_matmul``, see ``config.Kernels``.
        used: int32, how many tokens of the batch are any, the first ones; None: all.
    """

    stack: jax.Array
    layer: jax.Array
    kernel: str
    used: jax.Array | None


def products(x: jax.Array, matrices: Sequence[LayerOf]) -> tuple[jax.Array, ...]:
    """``x w`` of every matrix, all of one layer: ``[B, T, F]`` float32 each, of ``x [B, T, D]``."""
    _, layer, kernel, used = matrices[0]
    return layer_matmul(x, tuple(w.stack for w in matrices), layer, used, implementation=kernel)


def detach(layers: Any, name: str = "") -> tuple[Any, Any]:
    """The parameters of a stack of layers without its dense matrices, and these: ``{name: {...,
    name: [L, D, F]}}``.
    """
    left, taken = {}, {}
    for key, leaf in layers.items():
        if key == "w" and name not in KEPT and (leaf.ndim == 3 or blocks.are(leaf)):
            taken[key] = leaf
        elif isinstance(leaf, dict):
            left[key], below = detach(leaf, key)
            if below:
                taken[key] = below
        else:
            left[key] = leaf
    return left, taken


def attach(layer: Any, taken: Any, number: jax.Array, kernel: str, used: jax.Array | None) -> Any:
    """One layer's parameters with its matrices in their places, as ``LayerOf``."""
    whole = dict(layer)
    for key, leaf in taken.items():
        whole[key] = (
            attach(layer[key], leaf, number, kernel, used)
            if isinstance(leaf, dict)
            else LayerOf(leaf, number, kernel, used)
        )
    return whole
