"""A sampler's frozen matrices as whole stacks of all layers, so that matmuls read a layer in place.

A scan over layers slices its inputs, which copies every layer in every step on CPUs and GPUs. On
one device the loop of a sampler therefore closes over the stacks. Training keeps the slices: many
rows share one, and the matmuls have XLA's gradient. A mesh keeps them too, because XLA partitions
the matmuls.

Axes: L layers, D in, F out.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mint_jax.lora.slot_kernel import Products
from mint_jax.models.quantised import KEPT
from pallas_kernels.layer_matmul import blocks


class LayerOf(NamedTuple):
    """One layer's matrix in place of ``w``."""

    stack: jax.Array  # `[L, D, F]`, or blocks `[L, P, N, bytes]`, see `stored.py`
    layer: jax.Array
    kernel: str
    used: jax.Array | None  # int32, number of tokens of the batch in use, at the front; None: all


def products(matrices: Sequence[LayerOf]) -> Products:
    """Returns the products of rows with every one of these matrices of one layer, not yet made."""
    _, layer, kernel, used = matrices[0]
    return Products(tuple(w.stack for w in matrices), layer, kernel, used)


def detach(layers: Any, dense: bool, name: str = "", experts: bool = False) -> tuple[Any, Any]:
    """Splits a stack's parameters into those to scan over and those to keep whole.

    Whole are indexers, experts' matrices and, if ``dense``, for a sampler on one device, the other
    matrices. ``name`` and ``experts`` say where a subtree is.
    """
    # Experts are most of a model's bytes, and slices of all were read and written in every step,
    # visited or not (the 128 of Qwen3-30B-A3B are 1.2 GB a layer). On two cores with six layers of
    # 64 experts of 512 x 384, float32, 4 visited, a step of 1, 8 and 32 rows took 105-138, 143-148
    # and 214-228 ms with slices, and 6.5-8.4, 51-53 and 105-132 without.
    left, whole = {}, {}
    for key, leaf in layers.items():
        if key == "indexer" or (key == "w" and (experts or (dense and _readable(leaf, name)))):
            whole[key] = leaf
        elif isinstance(leaf, dict):
            left[key], below = detach(leaf, dense, key, experts or key == "experts")
            whole |= {key: below} if below else {}
        else:
            left[key] = leaf
    return left, whole


def _readable(leaf: jax.Array, name: str) -> bool:
    return name not in KEPT and (leaf.ndim == 3 or blocks.is_packed(leaf))


def side_by_side(layers: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a stack with its vectors ``[L, D]`` of one dtype as one array, and their split."""
    # A GPU copies each of a layer's slices by a launch of its own.
    leaves, tree = jax.tree.flatten(layers)
    at = [i for i, leaf in enumerate(leaves) if leaf.ndim == 2 and leaf.dtype == leaves[0].dtype]
    ends = list(itertools.accumulate(leaves[i].shape[1] for i in at))
    whole = jnp.concatenate([leaves[i] for i in at], axis=1) if at else None
    kept = [None if i in at else leaf for i, leaf in enumerate(leaves)]

    def apart(layer: Any) -> Any:
        row, rest = layer
        parts = jnp.split(row, ends[:-1]) if at else []
        found = dict(zip(at, parts))
        return jax.tree.unflatten(tree, [found.get(i, one) for i, one in enumerate(rest)])

    return (whole, kept), apart


def attach(
    layer: Any,
    whole: Any,
    number: jax.Array,
    kernel: str = "xla",
    used: jax.Array | None = None,
) -> Any:
    """Returns one layer's parameters with dense matrices as ``LayerOf``, and whole experts."""
    out = dict(layer)
    for key, leaf in whole.items():
        if key == "w":
            out[key] = LayerOf(leaf, number, kernel, used)
        elif key == "experts":
            own = layer[key]
            out[key] = {name: own[name] | of | {"layer": number} for name, of in leaf.items()}
        elif key != "indexer":  # see ``dsa``
            out[key] = attach(layer[key], leaf, number, kernel, used)
    return out
