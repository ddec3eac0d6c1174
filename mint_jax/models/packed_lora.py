"""Projections of routed experts with packed adapters: the base's grouped matmul plus each row's own low-rank product.

``y[m] = x[m] W[e] + (x[m] A[g]^T) B[g]`` with rows sorted by expert e and group g = (expert, adapter), for all projections that
read the same rows. On accelerators each product is a grouped matmul. On CPU the products with few columns (``x A^T``,
backward ``dy B^T`` and the factors' gradients) run in one loop over tiles of a group's rows that reads the wide rows once; the
products with few terms are sums over the rank, added to the base's result in one fused pass over it, which is all that is
read and written twice for the adapters' sake. The inner ``[M, R]`` is kept for the backward pass.

Axes: M rows, E experts, G groups, W adapter factors, D in, F out, R rank. Hu et al. 2021, arXiv 2106.09685, section 4.1.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from mint_jax.models.grouped import at, blank, dot, grouped_matmul, outer, over_tiles, tiled_matmul
from mint_jax.models.grouped_batching import Merged, each, joined

# Up to this rank ``h B`` is a sum over the rank, fused into one pass over the wide result; above it a second loop over tiles. On two
# AVX-512 cores, 2,048 rows, 32 experts of 512 x 512, four adapters: base alone 9 to 11 ms; with rank 4 / 8 / 16 the sum takes
# 10.3 / 12.3 / 11.6 ms and the loop 10.9 / 12.7 / 11.8; with rank 32 / 64 the sum 15.2 / 15.7 and the loop 12.5 / 12.4.
FEW_TERMS = 16


@struct.dataclass
class Groups:
    """Which rows have which factors.

    Attributes:
        first: ``[G]`` int32 first row of each group, ascending.
        sizes: ``[G]`` int32 rows of each group.
        index: ``[G]`` int32 factors of each group; no two groups have the same.
        factor: ``[M]`` int32 factors of each row; -1 for rows of no group.
        contiguous: rows of no group all come behind the others.
    """

    first: jax.Array
    sizes: jax.Array
    index: jax.Array
    factor: jax.Array
    contiguous: bool = struct.field(pytree_node=False, default=False)


Factors = tuple[jax.Array, jax.Array]  # A [W, R, D], B [W, R, F]


class Adapters(NamedTuple):
    """The adapters of one rank bucket.

    Attributes:
        groups: their rows.
        factors: of each projection, the scale already in B; None where these adapters have none.
    """

    groups: Groups
    factors: tuple[Factors | None, ...]


class _Terms(NamedTuple):
    """``h[m] w[factor of m]`` to be added: ``h [M, R]``, ``w [W, R, N]``."""

    h: jax.Array
    w: jax.Array
    groups: Groups


def project(x_MD: jax.Array, bases: Sequence[dict[str, jax.Array]], sizes_E: jax.Array, adapters: Sequence[Adapters]) -> list[jax.Array]:
    """``[M, F]`` of each projection, in the dtype of ``x``; zeros in rows behind the last expert.

    Args:
        x_MD: rows, those of expert 0 first.
        bases: of each projection ``{"w": [E, D, F]}`` and, quantised, ``"scale": [E, F]``.
        sizes_E: int32 rows of each expert.
        adapters: rank buckets.
    """
    return list(_project(x_MD, tuple(bases), sizes_E, tuple(adapters)))  # type: ignore[arg-type]


@jax.custom_vjp
def _project(x, bases, sizes, adapters):
    return _products(x, bases, sizes, adapters)[0]


@jax.custom_batching.custom_vmap
def _products(x, bases, sizes, adapters):
    """The projections, and the inner ``[M, R]`` of each bucket and projection."""
    inner = []
    for groups, factors in adapters:
        h = iter(jax.lax.platform_dependent(x, [pair[0] for pair in factors if pair], groups, cpu=_inner_tiles, default=_inner_grouped))
        inner.append(tuple(None if pair is None else next(h) for pair in factors))
    out = []
    for k, base in enumerate(bases):
        terms = [_Terms(h[k], one.factors[k][1], one.groups) for h, one in zip(inner, adapters) if one.factors[k]]
        out.append(_with_terms(x, base, sizes, terms, False, key=k))
    return tuple(out), tuple(inner)


def _forward(x, bases, sizes, adapters):
    # Whether the base learns is known while tracing, and kept as the structure of the residuals: a frozen base, which is the rule, then
    # has no product for its own gradient in the compiled program. As a value it would be a branch with both sides in it.
    trained = tuple((True,) if base["w"].perturbed else () for base in bases)
    args = jax.tree.map(lambda arg: arg.value, (x, bases, sizes, adapters), is_leaf=lambda arg: hasattr(arg, "perturbed"))
    out, inner = _products(*args)
    inner = jax.tree.map(lambda h: checkpoint_name(h, "expert_inner"), inner)
    return out, (*args, inner, trained)


def _backward(residuals, g):
    x, bases, sizes, adapters, inner, trained = residuals
    g = tuple(_dense(one) for one in g)
    dx, dfactors = _gradients(x, bases, sizes, adapters, inner, g)
    dbases = tuple(_base_gradient(x, one, sizes, base) if learns else None for base, one, learns in zip(bases, g, trained))
    return dx, dbases, None, tuple(Adapters(None, one) for one in dfactors)  # type: ignore[arg-type]


def _dense(g: Any) -> jax.Array:
    return jnp.zeros(g.shape, jnp.dtype(str(g.dtype))) if isinstance(g, SymbolicZero) else g


@jax.custom_batching.custom_vmap
def _gradients(x, bases, sizes, adapters, inner, g):
    """Of the rows, and of each bucket's factors."""
    back, grads = [], []
    for h, one in zip(inner, adapters):
        mine = [k for k, pair in enumerate(one.factors) if pair]
        args = x, [one.factors[k] for k in mine], one.groups, [h[k] for k in mine], [g[k] for k in mine]
        backs, dfactors = jax.lax.platform_dependent(*args, cpu=_backward_tiles, default=_backward_grouped)
        back.append(dict(zip(mine, backs)))
        given = dict(zip(mine, dfactors))
        grads.append(tuple(given.get(k) for k in range(len(bases))))
    dx = None
    for k, base in enumerate(bases):
        terms = [_Terms(b[k], one.factors[k][0], one.groups) for b, one in zip(back, adapters) if one.factors[k]]
        dx = _with_terms(g[k], base, sizes, terms, True, onto=dx, key=k)
    return dx, tuple(grads)


_project.defvjp(_forward, _backward, symbolic_zeros=True)


# Under vmap over policies: their rows in one order, see ``grouped_batching``.


@_products.def_vmap
def _products_of_policies(P, batched, x, bases, sizes, adapters):
    rows, *args = _merge(P, batched, x, bases, sizes, adapters)
    out = jax.tree.map(rows.back, _products(*args))
    return out, jax.tree.map(lambda _: True, out)


@_gradients.def_vmap
def _gradients_of_policies(P, batched, x, bases, sizes, adapters, inner, g):
    rows, *args = _merge(P, batched, x, bases, sizes, adapters)
    inner, g = (jax.tree.map(rows.take, tree, of) for tree, of in ((inner, batched[4]), (g, batched[5])))
    dx, grads = _gradients(*args, inner, g)
    out = rows.back(dx), jax.tree.map(lambda w: w.reshape(P, -1, *w.shape[1:]), grads)
    return out, jax.tree.map(lambda _: True, out)


def _merge(P, batched, x, bases, sizes, adapters):
    """The policies' rows, and what ``_products`` takes, for all of them."""
    of_x, of_bases, of_sizes, of_adapters = batched[:4]
    bases, of_bases = ([{name: leaf[name] for name in leaf if name != "index"} for leaf in tree] for tree in (bases, of_bases))
    sizes_PE, shared = each(sizes, of_sizes, P), not any(jax.tree.leaves(of_bases))
    rows = Merged(sizes_PE, x.shape[-2], shared)
    if shared:
        sizes = jnp.sum(sizes_PE, axis=0, dtype=sizes.dtype)
    else:
        bases, sizes = jax.tree.map(lambda w, of: joined(w, of, P), bases, of_bases), sizes_PE.reshape(-1)
        bases = [base | {"index": jnp.arange(base["w"].shape[0], dtype=jnp.int32)} for base in bases]  # as matrices of single policies
    out = []
    for (groups, factors), (of_groups, of_factors) in zip(adapters, of_adapters):
        W = next(pair[0].shape[-3] for pair in factors if pair)
        groups = jax.tree.map(lambda v, of: each(v, of, P), groups, of_groups)
        own = W * jnp.arange(P, dtype=jnp.int32)[:, None]
        factor = jnp.where(groups.factor < 0, -1, groups.factor + own)
        first = jnp.take_along_axis(rows.place_PM, jnp.minimum(groups.first, x.shape[-2] - 1), axis=1).reshape(-1)
        order = jnp.argsort(first, stable=True)
        sizes_G, index_G = groups.sizes.reshape(-1)[order], (groups.index + own).reshape(-1)[order]
        merged = Groups(first[order], sizes_G, index_G, rows.take(factor[..., None], True)[:, 0], groups.contiguous)
        out.append(Adapters(merged, jax.tree.map(lambda w, of: joined(w, of, P), factors, of_factors)))
    return rows, rows.take(x, of_x), bases, sizes, tuple(out)


def _base_gradient(x, g, sizes, base):
    return {"w": outer(x, g, sizes).astype(base["w"].dtype)} | ({"scale": None} if "scale" in base else {})


def _with_terms(x, base, sizes, terms, transposed, onto=None, key=0):
    """The base's product, transposed for the backward pass, plus ``terms``, plus ``onto``."""
    forms = {"cpu": functools.partial(_with_terms_tiles, key=key), "default": _with_terms_grouped}
    forms = {name: functools.partial(form, transposed=transposed) for name, form in forms.items()}
    return jax.lax.platform_dependent(x, base, sizes, terms, onto, **forms)


# On accelerators: grouped matmuls over rows that are contiguous by group.


def _grouped(x: jax.Array, w: jax.Array, groups: Groups, transposed: bool) -> jax.Array:
    # A ragged product wants the rows of its groups back to back from the first on. Rows of the bare base between them (a batch in
    # which some rows have no adapter) are moved behind, by a stable sort that keeps the groups' order, and their zeros back.
    if groups.contiguous:
        return grouped_matmul(x, w, groups.sizes, groups.index, transposed)
    front = jnp.argsort(groups.factor < 0, stable=True)  # the rows of groups, still sorted, then the others
    back = jnp.zeros_like(front).at[front].set(jnp.arange(front.shape[0], dtype=front.dtype))
    return grouped_matmul(x[front], w, groups.sizes, groups.index, transposed)[back]


def _scale_rows(y: jax.Array, scale_EF: jax.Array, sizes: jax.Array) -> jax.Array:
    expert_M = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(y.shape[0]), side="right")
    return (y * scale_EF[jnp.clip(expert_M, 0, sizes.shape[0] - 1)]).astype(y.dtype)


def _with_terms_grouped(x, base, sizes, terms, onto, transposed):
    if "scale" in base and transposed:
        x = _scale_rows(x, base["scale"], sizes)
    y = grouped_matmul(x, base["w"], sizes, base.get("index"), transposed)
    if "scale" in base and not transposed:
        y = _scale_rows(y, base["scale"], sizes)
    for h, w, groups in terms:
        y = y + _grouped(h, w, groups, False).astype(y.dtype)
    return y if onto is None else onto + y


def _inner_grouped(x, a, groups):
    return [_grouped(x, one, groups, True) for one in a]


def _backward_grouped(x, factors, groups, h, g):
    back, grads = [], []
    for (a, b), h_MR, g_MF in zip(factors, h, g):
        one, vjp = jax.vjp(lambda b, g_MF=g_MF: _grouped(g_MF, b, groups, True), b)
        back.append(one)
        (db,) = vjp(h_MR)
        (da,) = jax.vjp(lambda a: _grouped(x, a, groups, True), a)[1](one)
        grads.append((da, db))
    return back, grads


# On CPU.


def _inner_tiles(x, a, groups):
    def body(tile, group, h):
        rows, i = tile.read(x), groups.index[group]
        return [tile.add(total, dot(rows, at(one, i), (1, 1))) for total, one in zip(h, a)]

    h = [jnp.zeros((x.shape[0], one.shape[1]), x.dtype) for one in a]
    return over_tiles(body, h, x.shape[0], groups.sizes, groups.first)


def _with_terms_tiles(x, base, sizes, terms, onto, transposed, key):
    if "scale" in base and transposed:
        x = _scale_rows(x, base["scale"], sizes)
    scaled = None if transposed or "scale" not in base else lambda group, out: out * at(base["scale"], group)[None]
    y = tiled_matmul(x, base["w"], sizes, base.get("index"), transposed, onto, scaled, key)
    for h, w, groups in (one for one in terms if one.w.shape[1] > FEW_TERMS):
        y = over_tiles(
            lambda tile, group, y, h=h, w=w, groups=groups: tile.add(y, dot(tile.read(h), at(w, groups.index[group]), (1, 0))),
            *(y, y.shape[0], groups.sizes, groups.first),
        )
    if few := [one for one in terms if one.w.shape[1] <= FEW_TERMS]:
        # Backwards in a loop of one turn: in place, once. Outside a loop XLA fuses the sum into each of its consumers and computes, or
        # stores, it for every one of them: 8 % of the backward pass of two projections. The turn's number comes from the
        # data (``sizes``), or XLA would simplify the loop away.
        def add(zero, y):
            return functools.reduce(functools.partial(_add_terms, zero), few, y)

        y = jax.lax.fori_loop(jnp.where(jnp.sum(sizes) > 0, 0, 1), 1, add, y) if transposed else add(0, y)
    return y


def _add_terms(zero: jax.Array, y: jax.Array, terms: _Terms) -> jax.Array:
    """The sum over the rank, row by row; ``zero`` comes from the loop and keeps the terms inside it."""
    h, factor = terms.h.astype(jnp.float32), terms.groups.factor
    R, N = terms.w.shape[1:]
    rows_WN, first = terms.w.reshape(-1, N), jnp.maximum(factor, 0) * R + zero
    mine = (factor >= 0)[:, None]  # a select, not a product with 0: another policy's factors may be NaN
    out = y.astype(jnp.float32)
    for r in range(R):
        out = out + jnp.where(mine, h[:, r, None] * rows_WN[first + r].astype(jnp.float32), 0.0)
    return out.astype(y.dtype)


def _backward_tiles(x, factors, groups, h, g):
    def body(tile, group, carry):
        rows, i = tile.own(x), groups.index[group]  # a neighbour's row may be NaN: both sides of a sum over rows have zeros there
        new_back, new_grads = [], []
        for (_, b), h_MR, g_MF, total, (da, db) in zip(factors, h, g, *carry):
            g_t = tile.own(g_MF)
            mine = jnp.where(tile.mine, dot(g_t, at(b, i), (1, 1)), 0.0).astype(x.dtype)
            new_back.append(tile.add(total, mine))
            new_grads.append((_add_at(da, i, dot(mine, rows, (0, 0))), _add_at(db, i, dot(tile.own(h_MR), g_t, (0, 0)))))
        return new_back, new_grads

    back = [jnp.zeros((x.shape[0], a.shape[1]), x.dtype) for a, _ in factors]
    grads = [tuple(blank(w.shape, jnp.float32, groups.sizes, 2 * k + i) for i, w in enumerate(pair)) for k, pair in enumerate(factors)]
    back, grads = over_tiles(body, (back, grads), x.shape[0], groups.sizes, groups.first)
    return back, [(da.astype(a.dtype), db.astype(b.dtype)) for (da, db), (a, b) in zip(grads, factors)]


def _add_at(total: jax.Array, i: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(total, at(total, i) + part, i, 0)
