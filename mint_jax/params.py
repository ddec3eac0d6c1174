"""Parameter specs: one tree of ``ParamSpec`` yields shapes, init, shardings and sizes.

A model is a nested dict. Layers of one kind are one tree whose leaves have a leading ``layers``
axis, scanned by the model.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from mint_jax.nested import Tree, leaves_with_path, map_with_path, nest  # noqa: F401 - for readers


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Spec of one parameter.

    Attributes:
        shape: global shape; matrices are ``[in, out]``, stacked ones ``[layers, in, out]``.
        axes: logical axis name of each dimension, see ``sharding.RULES``.
        init: ``normal`` (std ``1/sqrt(fan_in)``), ``zeros`` or ``ones``.
        fan_in: dimension whose size scales ``normal``; the second last if None.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any = jnp.float32
    init: str = "normal"
    fan_in: int | None = None

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize

    def materialise(self, key: jax.Array) -> jax.Array:
        if self.init == "zeros":
            return jnp.zeros(self.shape, self.dtype)
        if self.init == "ones":
            return jnp.ones(self.shape, self.dtype)
        fan_in = self.fan_in if self.fan_in is not None else self.shape[-2]
        return (jax.random.normal(key, self.shape, jnp.float32) * fan_in**-0.5).astype(self.dtype)


def init(specs: Tree, key: jax.Array) -> Tree:
    """Returns random parameters; each leaf depends on the key and its own path."""
    return map_with_path(
        lambda path, spec: spec.materialise(jax.random.fold_in(key, path_seed(path))), specs
    )


def path_seed(path: str) -> int:
    """Returns a stable 31-bit number for a path (Python's ``hash`` differs between runs)."""
    seed = 0
    for byte in path.encode():
        seed = (seed * 1000003 ^ byte) & 0x7FFFFFFF
    return seed


def abstract(specs: Tree, shardings: Tree | None = None) -> Tree:
    """Returns the tree as ``ShapeDtypeStruct``, for ``jit.lower`` and restore targets."""
    if shardings is None:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
    return jax.tree.map(
        lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), specs, shardings
    )


def count(specs: Tree) -> int:
    """Returns the number of parameters of a tree of specs or arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(specs))


def nbytes(tree: Tree) -> int:
    """Returns the bytes of a tree of specs or arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
