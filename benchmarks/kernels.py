"""Time that adapters add to the grouped matmul of one expert projection pair (gate and up).

Cells are shapes of decoding, prefill and training (forward and backward, frozen base). The sides of
a cell: the base alone; ``model``, the implementation that a model uses on this platform; and each
implementation of ``pallas_kernels.packed_lora``, never interpreted. ``moe_step`` compares with
``jax.lax.ragged_dot``.

``over_base`` is a side's time over the base's. ``floor_over_base`` is counted: least bytes of base
and adapters over the base's, with the adapters' product alone or inside the base's
(``pallas_kernels.cost``). ``empty`` names the sides that cannot run, with the reason.

Axes: M rows (a token and one of its experts), D in, F out, R rank, E experts, P adapters, G groups
(expert, adapter).
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from mint_jax.models.grouped import grouped_matmul
from mint_jax.models.packed_lora import Adapters, Groups, project
from pallas_kernels import cost, dispatch, packed_lora

PROJECTIONS = 2  # gate and up
CHECKED = 16  # rows of each side that are compared with float64

Side = Callable[[], Any]


class Cell:
    """Rows routed at random, factors of all (expert, adapter), and the base's matrices."""

    def __init__(self, size: Any, cell: Any, dtype: Any, seed: int):
        E, P, D, F, R = size.experts, cell.adapters, size.d_model, size.width, cell.rank
        rng = np.random.default_rng(seed)
        expert = np.argsort(rng.random((cell.tokens, E)), axis=1)[:, : size.per_token]
        adapter = np.arange(cell.tokens) * P // cell.tokens
        self.factor = np.sort((expert * P + adapter[:, None]).reshape(-1)).astype(np.int32)
        self.sizes_G = np.bincount(self.factor, minlength=E * P).astype(np.int32)
        self.sizes_E = self.sizes_G.reshape(E, P).sum(axis=1, dtype=np.int32)
        M, key, self.adapters = len(self.factor), jax.random.key(seed), P
        keys = iter(jax.random.split(key, 2 + 3 * PROJECTIONS))

        def normal(*shape: int, scale: float = 1.0) -> jax.Array:
            return (scale * jax.random.normal(next(keys), shape)).astype(dtype)

        self.x = normal(M, D)
        self.g = [normal(M, F)] * PROJECTIONS
        self.w = [normal(E, D, F, scale=D**-0.5) for _ in range(PROJECTIONS)]
        self.a = [normal(E * P, R, D, scale=D**-0.5) for _ in range(PROJECTIONS)]
        self.b = [normal(E * P, R, F, scale=R**-0.5) for _ in range(PROJECTIONS)]
        self.backward = cell.backward

    def floor(self) -> dict[str, float]:
        """The least bytes of base and adapters over the base's."""
        lora, base = cost.Cost(0, 0, 0), cost.Cost(0, 0, 0)
        for backward in (False, True)[: 1 + self.backward]:
            lora += cost.packed_lora(self.x, self.a, self.b, self.g, self.factor, backward)
            base += cost.grouped(self.x, self.w, self.sizes_E, backward)
        return {
            "alone": round(1 + lora.nbytes / base.nbytes, 4),
            "inside": round(1 + lora.weights / base.nbytes, 4),
        }

    def sides(self) -> tuple[dict[str, Side], dict[str, str]]:
        """Returns the sides that run here, and why others do not."""
        factor, sizes = jnp.asarray(self.factor), jnp.asarray(self.sizes_E)
        sides, empty = {"base": self._side(lambda x, w: base_products(x, w, sizes), self.x)}, {}
        args = self.x, self.a, self.b
        sides["model"] = self._side(
            functools.partial(model_products, sizes=sizes, groups=self.groups()), *args
        )
        for one in packed_lora.ADD:
            if reason := self._reason(one):
                empty[one.name] = reason
            else:
                sides[one.name] = self._side(
                    functools.partial(_named, sizes=sizes, factor=factor, name=one.name), *args
                )
        return sides, empty

    def groups(self) -> Groups:
        G = len(self.sizes_G)
        first = np.cumsum(self.sizes_G) - self.sizes_G
        return Groups(
            *(jnp.asarray(v, jnp.int32) for v in (first, self.sizes_G, np.arange(G))),
            factor=jnp.asarray(self.factor),
            contiguous=True,
        )

    def _reason(self, one: dispatch.Implementation) -> str:
        """Returns the reason why an implementation cannot run; empty if it can."""
        if one.platform not in (None, here := dispatch.platform_here()):
            return f"a kernel for {one.platform}, and this is {here}"
        tables: list[Any] = [(packed_lora.ADD, (self.x, self.a, self.b, self.g, self.factor))]
        if self.backward:
            tables.append(
                (packed_lora.BACKWARD, (self.x, self.a, self.b, self.g, self.x, self.factor))
            )
        for table, args in tables:
            reason = dict(dispatch.explain(table, *args)).get(one.name, "has no gradients")
            if not reason.startswith("serves"):
                return reason
        return ""

    def _side(self, fn: Any, *args: Any) -> Side:
        """One pass of ``fn(*args, w)``; backward with the gradients of the arguments."""
        if not self.backward:
            forward = jax.jit(fn)
            return lambda: jax.block_until_ready(forward(*args, self.w))

        def both(args, w, g):
            y, vjp = jax.vjp(lambda *args: fn(*args, w), *args)
            return y, vjp(g)

        run = jax.jit(both)
        return lambda: jax.block_until_ready(run(args, self.w, self.g))

    def error(self, made: Any) -> float:
        """The largest difference of some rows from float64, over their largest entry."""
        made, worst = (made[0] if self.backward else made), 0.0
        rows = np.linspace(0, len(self.factor) - 1, CHECKED).astype(int)
        for k, y in enumerate(made):
            for m in rows:
                g = int(self.factor[m])
                x, w, a, b = (
                    np.array(v, np.float64)
                    for v in (self.x[m], self.w[k][g // self.adapters], self.a[k][g], self.b[k][g])
                )
                want = x @ w + (a @ x) @ b
                error = np.abs(np.array(y[m], np.float64) - want).max() / np.abs(want).max()
                worst = max(worst, float(error))
        return float(f"{worst:.2g}")


def base_products(x: jax.Array, w: Any, sizes: jax.Array) -> list[jax.Array]:
    return [grouped_matmul(x, one, sizes) for one in w]


def model_products(
    x: jax.Array, a: Any, b: Any, w: Any, sizes: jax.Array, groups: Groups
) -> list[jax.Array]:
    return project(x, [{"w": one} for one in w], sizes, [Adapters(groups, tuple(zip(a, b)))])


def _named(
    x: jax.Array, a: Any, b: Any, w: Any, sizes: jax.Array, factor: jax.Array, name: str
) -> list[jax.Array]:
    return list(_adapted(name, x, tuple(a), tuple(b), tuple(base_products(x, w, sizes)), factor))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _adapted(name: str, x: Any, a: Any, b: Any, onto: Any, factor: Any) -> Any:
    return packed_lora.packed_lora(x, a, b, onto, factor, name)


def _adapted_backward(name: str, residuals: Any, g: Any) -> Any:
    x, a, b, factor = residuals
    return *packed_lora.gradients(x, a, b, g, jnp.zeros_like(x), factor, name), g, None


_adapted.defvjp(
    lambda name, x, a, b, onto, factor: (
        _adapted(name, x, a, b, onto, factor),
        (x, a, b, factor),
    ),
    _adapted_backward,
)


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    dtype = jnp.dtype(config.dtype)
    report: dict[str, Any] = {
        "bench": "kernels",
        "device": timing.device(),
        "n": config.n,
        "dtype": config.dtype,
        "size": config.size.to_dict(),
        "cells": [],
    }
    for name, cell in config.cells.items():
        report["cells"].append(
            {"name": name}
            | cell.to_dict()
            | _measured(name, Cell(config.size, cell, dtype, config.seed), config)
        )
    return report


def _measured(name: str, cell: Cell, config: Any) -> dict[str, Any]:
    sides, empty = cell.sides()
    errors = {side: cell.error(call()) for side, call in sides.items() if side != "base"}
    times = timing.in_turn(name, sides, config.n)
    return {
        "rows": len(cell.factor),
        "groups_present": int(np.count_nonzero(cell.sizes_G)),
        "seconds": timing.medians_of(times),
        "over_base": {side: timing.ratio(times, side, "base") for side in sides if side != "base"},
        "floor_over_base": cell.floor(),
        "errors": errors,
        "empty": empty,
    }
