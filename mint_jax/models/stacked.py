"""A sampler's frozen matrices as whole stacks of all layers, so that matmuls read a layer in place.

A scan over layers slices its inputs. On TPUs the slice is fused into the matmul; on CPUs and GPUs
it copies every layer in every step. On one device the loop of a sampler therefore closes over the
stacks, and ``pallas_kernels.layer_matmul`` reads each layer in place. Training keeps the scan's
slices: many rows share one, and the matmuls have XLA's gradient. A mesh keeps them too, because XLA
partitions the matmuls.

Axes: L layers, D in, F out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.layer_matmul import blocks, layer_matmul

# The router is small and float32; kv_b is absorbed into queries and values by other matmuls.
KEPT = ("router", "kv_b")


class LayerOf(NamedTuple):
    """One layer's matrix in place of ``w``.

    Attributes:
        stack: ``[L, D, F]``, or blocks ``[L, P, N, bytes]``, see ``stored.py``.
        layer: int32.
        kernel: implementation of ``layer_matmul``, see ``config.Kernels``.
        used: int32, number of tokens of the batch in use, at the front; None: all.
    """

    stack: jax.Array
    layer: jax.Array
    kernel: str
    used: jax.Array | None


def products(x: jax.Array, matrices: Sequence[LayerOf]) -> tuple[jax.Array, ...]:
    """Returns ``x w`` of every matrix of one layer: ``[B, T, F]`` float32 each, ``x [B, T, D]``."""
    _, layer, kernel, used = matrices[0]
    return layer_matmul(x, tuple(w.stack for w in matrices), layer, used, implementation=kernel)


def detach(layers: Any, name: str = "") -> tuple[Any, Any]:
    """Splits a stack's parameters into those without dense matrices and these: ``{name: {..., name:
    [L, D, F]}}``.
    """
    left, taken = {}, {}
    for key, leaf in layers.items():
        if key == "w" and name not in KEPT and (leaf.ndim == 3 or blocks.is_packed(leaf)):
            taken[key] = leaf
        elif isinstance(leaf, dict):
            left[key], below = detach(leaf, key)
            if below:
                taken[key] = below
        else:
            left[key] = leaf
    return left, taken


def attach(layer: Any, taken: Any, number: jax.Array, kernel: str, used: jax.Array | None) -> Any:
    """Returns one layer's parameters with its matrices in place, as ``LayerOf``."""
    whole = dict(layer)
    for key, leaf in taken.items():
        whole[key] = (
            attach(layer[key], leaf, number, kernel, used)
            if isinstance(leaf, dict)
            else LayerOf(leaf, number, kernel, used)
        )
    return whole
