"""Gate and up of routed experts, for ``gpu``: the base's grouped products alone, and with adapters.
Each side repeats its products in one program, so that no call from the host is in the times.

Axes: M rows (a token and one of its experts), D in, F out, R rank, E experts, P adapters, G groups
(expert, adapter).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax.models.packed_lora import Adapters, Groups, project
from pallas_kernels import cost

PROJECTIONS = 2  # gate and up


class Cell:
    """Rows routed at random, factors of all (expert, adapter), and the base's matrices.

    Attributes:
        nbytes, flops: of one pass of the base.
        floor: least bytes of base and adapters over the base's (``pallas_kernels.cost``).
    """

    def __init__(self, size: Any, cell: Any, dtype: Any, seed: int):
        E, P, D, F, R = size.experts, cell.adapters, size.d_model, size.width, cell.rank
        rng = np.random.default_rng(seed)
        expert = np.argsort(rng.random((cell.tokens, E)), axis=1)[:, : size.per_token]
        adapter = np.arange(cell.tokens) * P // cell.tokens
        factor = np.sort((expert * P + adapter[:, None]).reshape(-1)).astype(np.int32)
        sizes_G = np.bincount(factor, minlength=E * P).astype(np.int32)
        sizes_E = sizes_G.reshape(E, P).sum(axis=1, dtype=np.int32)
        keys = iter(jax.random.split(jax.random.key(seed), 2 + 3 * PROJECTIONS))

        def normal(*shape: int, scale: float = 1.0) -> jax.Array:
            return (scale * jax.random.normal(next(keys), shape)).astype(dtype)

        self.rows, self.backward = len(factor), cell.backward
        self.x, self.g = normal(self.rows, D), [normal(self.rows, F)] * PROJECTIONS
        self.w = [normal(E, D, F, scale=D**-0.5) for _ in range(PROJECTIONS)]
        self.a = [normal(E * P, R, D, scale=D**-0.5) for _ in range(PROJECTIONS)]
        self.b = [normal(E * P, R, F, scale=R**-0.5) for _ in range(PROJECTIONS)]
        self._sizes = jnp.asarray(sizes_E)
        first = np.cumsum(sizes_G) - sizes_G
        rows_of = (jnp.asarray(v, jnp.int32) for v in (first, sizes_G, np.arange(E * P)))
        self._groups = Groups(*rows_of, factor=jnp.asarray(factor), contiguous=True)
        passes = (False, True)[: 1 + self.backward]
        touched = float(np.count_nonzero(sizes_E)) / E
        self.nbytes = len(passes) * touched * sum(w.nbytes for w in self.w)
        self.flops = len(passes) * 2 * self.rows * sum(w[0].size for w in self.w)
        lora, base = cost.Cost(0, 0, 0), cost.Cost(0, 0, 0)
        for backward in passes:
            lora += cost.packed_lora(self.x, self.a, self.b, self.g, factor, backward)
            base += cost.grouped(self.x, self.w, sizes_E, backward)
        self.floor = {
            "alone": round(1 + lora.nbytes / base.nbytes, 4),
            "inside": round(1 + lora.weights / base.nbytes, 4),
        }

    def sides(self, loops: int) -> dict[str, Callable[[], Any]]:
        """Returns calls of ``loops`` passes as models make them, ``base`` and ``with_adapters``."""

        def base(x: jax.Array, a: Any, b: Any, w: Any) -> list[jax.Array]:
            return project(x, [{"w": one} for one in w], self._sizes, [])

        def with_adapters(x: jax.Array, a: Any, b: Any, w: Any) -> list[jax.Array]:
            adapters = [Adapters(self._groups, tuple(zip(a, b)))]
            return project(x, [{"w": one} for one in w], self._sizes, adapters)

        return {fn.__name__: self._looped(fn, loops) for fn in (base, with_adapters)}

    def _looped(self, fn: Callable[..., Any], loops: int) -> Callable[[], Any]:
        def once(x: jax.Array, a: Any, b: Any, w: Any) -> Any:
            if not self.backward:
                return fn(x, a, b, w)
            y, vjp = jax.vjp(lambda x, a, b: fn(x, a, b, w), x, a, b)
            return y, vjp(list(self.g))

        @jax.jit
        def run(x: jax.Array, a: Any, b: Any, w: Any) -> jax.Array:
            def body(_: jax.Array, x: jax.Array) -> jax.Array:
                made = jax.tree.leaves(once(x, a, b, w))
                some = [leaf.reshape(-1)[0].astype(jnp.float32) for leaf in made]
                return x.at[0, 0].add((1e-30 * functools.reduce(jnp.add, some)).astype(x.dtype))

            return jax.lax.fori_loop(0, loops, body, x)

        return lambda: run(self.x, self.a, self.b, self.w)
