"""Projections of routed experts with packed adapters: the base's grouped matmul plus each row's own
low-rank product.

``y[m] = x[m] W[e] + (x[m] A[g]^T) B[g]`` with rows sorted by expert e and group g = (expert,
adapter), for all projections of the same rows. On TPUs and NVIDIA GPUs the adapters' part is a
kernel of ``pallas_kernels`` where it applies; elsewhere on accelerators each product is a grouped
matmul. On CPU the products with few columns (``x A^T``, backward ``dy B^T`` and the factors'
gradients) run in one loop over tiles of a group's rows, which reads the wide rows once. The
products with few terms are sums over the rank, added to the base's result in one fused pass over
it.

Axes: M rows, E experts, G groups, W adapter factors, D in, F out, R rank. Hu et al. 2021, arXiv
2106.09685, section 4.1.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.custom_derivatives import SymbolicZero

from mint_jax.models.config import Kernels
from mint_jax.models.grouped import (
    at,
    blank,
    dot,
    grouped_matmul,
    in_place,
    outer,
    over_tiles,
    tiled_matmul,
)
from pallas_kernels import packed_lora as op
from pallas_kernels import packed_matmul
from pallas_kernels.dispatch import Implementation, anything, named, run

# Up to this rank ``h B`` is a sum over the rank, fused into one pass over the wide result; above it
# a second loop over tiles. On two AVX-512 cores with 2,048 rows, 32 experts of 512 x 512 and four
# adapters, the base alone takes 9 to 11 ms; with rank 4 / 8 / 16 the sum takes 10.3 / 12.3 / 11.6
# ms and the loop 10.9 / 12.7 / 11.8; with rank 32 / 64 the sum 15.2 / 15.7 and the loop 12.5 /
# 12.4.
FEW_TERMS = 16
# Average rows of an expert up to which packed matmul on TPU also serves rows without adapters: one
# tile. Not measured on a TPU: below it, the copy that ``ragged_dot`` needs has more bytes than the
# rows.
FEW_ROWS = 128


@struct.dataclass
class Groups:
    """Assignment of rows to factors.

    Attributes:
        first: ``[G]`` int32 first row of each group, ascending.
        sizes: ``[G]`` int32 rows of each group.
        index: ``[G]`` int32 factors of each group, all different.
        factor: ``[M]`` int32 factors of each row; -1 for rows of no group.
        contiguous: rows of no group all come after the others.
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
        factors: of each projection; None if these adapters do not target it.
        scale: ``[M]`` float32 scale of each row's adapter, if B does not include it; forward only.
    """

    groups: Groups
    factors: tuple[Factors | None, ...]
    scale: jax.Array | None = None


class _Terms(NamedTuple):
    """A term ``h[m] w[factor of m]`` to add: ``h [M, R]``, ``w [W, R, N]``."""

    h: jax.Array
    w: jax.Array
    groups: Groups


def project(
    x_MD: jax.Array,
    bases: Sequence[dict[str, jax.Array]],
    sizes_E: jax.Array,
    adapters: Sequence[Adapters],
    kernels: Kernels = Kernels(),
) -> list[jax.Array]:
    """Returns ``[M, F]`` of each projection, in the dtype of ``x``; zeros in rows after the last
    expert.

    Args:
        x_MD: rows, those of expert 0 first.
        bases: for each projection ``{"w": [E, D, F]}`` and, if quantised, ``"scale": [E, F]``; with
            ``"index"``, a number, w has more matrices, and expert 0's is at that index.
        sizes_E: int32 rows of each expert.
        adapters: rank buckets.
        kernels: implementations, see ``config.Kernels``.
    """
    return list(_project(kernels, x_MD, tuple(bases), sizes_E, tuple(adapters)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(kernels, x, bases, sizes, adapters):
    return _products(kernels)(x, bases, sizes, adapters)


def _forward(kernels, x, bases, sizes, adapters):
    # Whether the base is trainable is known while tracing and kept as structure of the residuals,
    # so that a frozen base has no matmul for its own gradient. As a value it would be a branch.
    trained = tuple((True,) if base["w"].perturbed else () for base in bases)
    args = jax.tree.map(
        lambda arg: arg.value,
        (x, bases, sizes, adapters),
        is_leaf=lambda arg: hasattr(arg, "perturbed"),
    )
    return _products(kernels)(*args), (*args, trained)


def _backward(kernels, residuals, g):
    x, bases, sizes, adapters, trained = residuals
    g = tuple(_dense(one) for one in g)
    dx, dfactors = _gradients(kernels)(x, bases, sizes, adapters, g)
    dbases = tuple(
        _base_gradient(x, one, sizes, base) if learns else None
        for base, one, learns in zip(bases, g, trained)
    )
    return dx, dbases, None, tuple(Adapters(None, one) for one in dfactors)  # type: ignore[arg-type]


_project.defvjp(_forward, _backward, symbolic_zeros=True)


def _dense(g: Any) -> jax.Array:
    return jnp.zeros(g.shape, jnp.dtype(str(g.dtype))) if isinstance(g, SymbolicZero) else g


def _products(kernels: Kernels) -> Any:
    """Returns the projections as a function."""
    return _by_platform(kernels, _products_tiles, _products_kernels)


def _gradients(kernels: Kernels) -> Any:
    """Returns the gradients of the rows and of each bucket's factors as a function."""
    return _by_platform(kernels, _gradients_tiles, _gradients_kernels)


def _by_platform(kernels: Kernels, tiles: Any, products: Any) -> Any:
    # A named kernel also runs on a CPU, in interpret mode.
    of_kernels = any(
        map(named, (kernels.packed_lora, kernels.grouped_matmul, kernels.packed_matmul))
    )
    default = functools.partial(products, kernels=kernels)
    return (
        default
        if of_kernels
        else lambda *args: jax.lax.platform_dependent(*args, cpu=tiles, default=default)
    )


def _base_gradient(x, g, sizes, base):
    dw = in_place(outer(x, g, sizes), base["w"], base.get("index"))
    return {"w": dw} | {name: None for name in ("scale", "index") if name in base}


# Accelerators: grouped matmuls over rows that are contiguous by group.


def _grouped(
    x: jax.Array, w: jax.Array, groups: Groups, transposed: bool, kernel: str
) -> jax.Array:
    # A ragged product needs its groups' rows contiguous from the start. Rows without an adapter
    # between them are moved to the end by a stable sort, and their zeros back.
    if groups.contiguous:
        return grouped_matmul(x, w, groups.sizes, groups.index, transposed, kernel)
    # Rows of groups, still sorted, then the others.
    front = jnp.argsort(groups.factor < 0, stable=True)
    back = jnp.zeros_like(front).at[front].set(jnp.arange(front.shape[0], dtype=front.dtype))
    return grouped_matmul(x[front], w, groups.sizes, groups.index, transposed, kernel)[back]


def _scale_rows(y: jax.Array, scale_EF: jax.Array, sizes: jax.Array) -> jax.Array:
    expert_M = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(y.shape[0]), side="right")
    return (y * scale_EF[jnp.clip(expert_M, 0, sizes.shape[0] - 1)]).astype(y.dtype)


def _base_grouped(x, base, sizes, transposed, kernel):
    if "scale" in base and transposed:
        x = _scale_rows(x, base["scale"], sizes)
    y = grouped_matmul(x, base["w"], sizes, base.get("index"), transposed, kernel)
    return _scale_rows(y, base["scale"], sizes) if "scale" in base and not transposed else y


def _add_grouped(x, a, b, onto, factor, scale=None, *, groups, kernel):
    h = [_grouped(x, one, groups, True, kernel) for one in a]
    h = h if scale is None else [(one * scale[:, None]).astype(one.dtype) for one in h]
    return tuple(
        y + _grouped(one, w, groups, False, kernel).astype(y.dtype) for y, one, w in zip(onto, h, b)
    )


def _back_grouped(x, a, b, g, dx, factor, *, groups, kernel):
    da, db = [], []
    for a_k, b_k, g_k in zip(a, b, g):
        dh, vjp = jax.vjp(lambda w, g_k=g_k: _grouped(g_k, w, groups, True, kernel), b_k)
        h, vjp_a = jax.vjp(lambda w: _grouped(x, w, groups, True, kernel), a_k)
        da.append(*vjp_a(dh))
        db.append(*vjp(h))
        dx = dx + _grouped(dh, a_k, groups, False, kernel).astype(dx.dtype)
    return dx, tuple(da), tuple(db)


def _table(
    table: Sequence[Implementation], grouped: Any, groups: Groups, kernels: Kernels
) -> tuple[Implementation, ...]:
    """Returns the accelerators' kernels, with grouped products as the fallback instead of the loop
    over runs, which is slow for many runs.
    """
    form = functools.partial(grouped, groups=groups, kernel=kernels.grouped_matmul)
    return (*(one for one in table if one.platform), Implementation("xla", None, form, anything))


def _products_kernels(x, bases, sizes, adapters, kernels):
    kernel, adapters = _one_pass(kernels, bases), list(adapters)
    first = next((n for n, one in enumerate(adapters) if all(one.factors)), None)
    if kernel == "xla" or (first is None and not _reads_few(x, bases, sizes)):
        out = [_base_grouped(x, base, sizes, False, kernels.grouped_matmul) for base in bases]
        return tuple(_add(x, out, adapters, kernels))
    # A bucket with factors of all projections runs in the base's pass (or factors that no row
    # uses); other buckets are added to its result.
    own = adapters.pop(first) if first is not None else None
    factor, scale = (
        (jnp.full(x.shape[:1], -1, jnp.int32), None)
        if own is None
        else (own.groups.factor, own.scale)
    )
    a, b = _unused_factors(x, bases) if own is None else _present(own.factors)[1]

    def two_passes(x, w, sizes, a, b, factor, scale, place, w_scale):
        index = {} if place is None else {"index": place}
        scales = [{}] * len(w) if w_scale is None else [{"scale": one} for one in w_scale]
        base = [
            _base_grouped(x, {"w": one} | index | of, sizes, False, kernels.grouped_matmul)
            for one, of in zip(w, scales)
        ]
        return tuple(
            _add(
                x,
                base,
                [] if own is None else [Adapters(own.groups, tuple(zip(a, b)), scale)],
                kernels,
            )
        )

    table = (
        *(one for one in packed_matmul.MATMUL if one.platform),
        Implementation("xla", None, two_passes, anything),
    )
    w_scale = [base["scale"] for base in bases] if "scale" in bases[0] else None
    args = (
        x,
        [base["w"] for base in bases],
        sizes,
        a,
        b,
        factor,
        scale,
        bases[0].get("index"),
        w_scale,
    )
    return tuple(_add(x, list(run("packed_matmul", table, kernel, args)), adapters, kernels))


def _reads_few(x: jax.Array, bases: Sequence[dict[str, jax.Array]], sizes: jax.Array) -> bool:
    """Returns True if the kernel should also run the base alone: it reads whole stacks and 8-bit
    matrices in place, where a ragged product copies a layer's experts in the dtype of ``x``.

    With many rows per expert that copy is small next to the matmul, whose larger tiles then win.
    """
    return not {"index", "scale"}.isdisjoint(bases[0]) and x.shape[0] <= FEW_ROWS * sizes.shape[0]


def _unused_factors(
    x: jax.Array, bases: Sequence[dict[str, jax.Array]]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns zero factors of one adapter of rank 8 for each projection."""
    return tuple(
        [jnp.zeros((1, 8, base["w"].shape[axis]), x.dtype) for base in bases] for axis in (1, 2)
    )  # type: ignore[return-value]


def _one_pass(kernels: Kernels, bases: Sequence[dict[str, jax.Array]]) -> str:
    """Returns the implementation of base and adapters in one product: auto, xla (two products), or
    a kernel's name.

    Raises:
        ValueError: a named kernel cannot serve.
    """
    kernel = kernels.packed_matmul
    if any("index" in base and base["index"].ndim for base in bases):
        if named(kernel):
            raise ValueError(
                f"packed_matmul by {kernel}: each policy has its own experts' matrices; choose auto"
                " or xla"
            )
        return "xla"
    return (
        "xla"
        if kernel == "auto" and {kernels.packed_lora, kernels.grouped_matmul} != {"auto"}
        else kernel
    )


def _add(x, out, adapters, kernels):
    """Adds the adapters' part to each projection in ``out``."""
    out = list(out)
    for groups, factors, scale in adapters:
        present, (a, b) = _present(factors)
        table = _table(op.ADD, _add_grouped, groups, kernels)
        args = x, a, b, [out[k] for k in present], groups.factor, scale
        for k, y in zip(present, run("packed_lora", table, kernels.packed_lora, args)):
            out[k] = y
    return out


def _gradients_kernels(x, bases, sizes, adapters, g, kernels):
    dx = functools.reduce(
        jnp.add,
        [
            _base_grouped(one, base, sizes, True, kernels.grouped_matmul)
            for base, one in zip(bases, g)
        ],
    )
    grads = []
    for groups, factors, _ in adapters:
        present, (a, b) = _present(factors)
        table, args = (
            _table(op.BACKWARD, _back_grouped, groups, kernels),
            (
                x,
                a,
                b,
                [g[k] for k in present],
                dx,
                groups.factor,
            ),
        )
        dx, da, db = run("packed_lora backward", table, kernels.packed_lora, args)
        given = dict(zip(present, zip(da, db)))
        grads.append(tuple(given.get(k) for k in range(len(bases))))
    return dx, tuple(grads)


def _present(factors):
    """Returns the indices of projections with factors, and their A and B."""
    present = [k for k, pair in enumerate(factors) if pair]
    return present, tuple([factors[k][i] for k in present] for i in range(2))


# CPU.


def _products_tiles(x, bases, sizes, adapters):
    inner = []
    for groups, factors, scale in adapters:
        h = iter(_inner_tiles(x, _present(factors)[1][0], groups))
        inner.append([None if pair is None else _scaled(next(h), scale) for pair in factors])
    out = []
    for k, base in enumerate(bases):
        terms = [
            _Terms(h[k], one.factors[k][1], one.groups)
            for h, one in zip(inner, adapters)
            if one.factors[k]
        ]
        out.append(_with_terms_tiles(x, base, sizes, terms, None, False, k))
    return tuple(out)


def _scaled(h: jax.Array, scale: jax.Array | None) -> jax.Array:
    return h if scale is None else (h * scale[:, None]).astype(h.dtype)


def _gradients_tiles(x, bases, sizes, adapters, g):
    back, grads = [], []
    for groups, factors, _ in adapters:
        present, _ = _present(factors)
        backs, dfactors = _backward_tiles(
            x, [factors[k] for k in present], groups, [g[k] for k in present]
        )
        back.append(dict(zip(present, backs)))
        given = dict(zip(present, dfactors))
        grads.append(tuple(given.get(k) for k in range(len(bases))))
    dx = None
    for k, base in enumerate(bases):
        terms = [
            _Terms(b[k], one.factors[k][0], one.groups)
            for b, one in zip(back, adapters)
            if one.factors[k]
        ]
        dx = _with_terms_tiles(g[k], base, sizes, terms, dx, True, k)
    return dx, tuple(grads)


def _inner_tiles(x, a, groups):
    def body(tile, group, h):
        rows, i = tile.read(x), groups.index[group]
        return [tile.add(total, dot(rows, at(one, i), (1, 1))) for total, one in zip(h, a)]

    h = [jnp.zeros((x.shape[0], one.shape[1]), x.dtype) for one in a]
    return over_tiles(body, h, x.shape[0], groups.sizes, groups.first)


def _with_terms_tiles(x, base, sizes, terms, onto, transposed, key):
    if "scale" in base and transposed:
        x = _scale_rows(x, base["scale"], sizes)
    scaled = (
        None
        if transposed or "scale" not in base
        else lambda group, out: out * at(base["scale"], group)[None]
    )
    y = tiled_matmul(x, base["w"], sizes, base.get("index"), transposed, onto, scaled, key)
    for h, w, groups in (one for one in terms if one.w.shape[1] > FEW_TERMS):
        y = over_tiles(
            lambda tile, group, y, h=h, w=w, groups=groups: tile.add(
                y, dot(tile.read(h), at(w, groups.index[group]), (1, 0))
            ),
            *(y, y.shape[0], groups.sizes, groups.first),
        )
    if few := [one for one in terms if one.w.shape[1] <= FEW_TERMS]:
        # In the backward pass the sum runs in a loop of one iteration, in place. Outside a loop XLA
        # fuses it into each consumer and repeats it: 8 % of the backward pass of two projections.
        # The trip count comes from data (``sizes``), or XLA would remove the loop.
        def add(zero, y):
            return functools.reduce(functools.partial(_add_terms, zero), few, y)

        y = (
            jax.lax.fori_loop(jnp.where(jnp.sum(sizes) > 0, 0, 1), 1, add, y)
            if transposed
            else add(0, y)
        )
    return y


def _add_terms(zero: jax.Array, y: jax.Array, terms: _Terms) -> jax.Array:
    """Sums over the rank, row by row; ``zero`` comes from the loop and keeps the terms inside
    it.
    """
    h, factor = terms.h.astype(jnp.float32), terms.groups.factor
    R, N = terms.w.shape[1:]
    rows_WN, first = terms.w.reshape(-1, N), jnp.maximum(factor, 0) * R + zero
    # A select, not a product with 0: another policy's factors may be NaN.
    has_factor = (factor >= 0)[:, None]
    out = y.astype(jnp.float32)
    for r in range(R):
        term = h[:, r, None] * rows_WN[first + r].astype(jnp.float32)
        out = out + jnp.where(has_factor, term, 0.0)
    return out.astype(y.dtype)


def _backward_tiles(x, factors, groups, g):
    def body(tile, group, carry):
        # A neighbour's row may be NaN: both sides of a sum over rows are zeroed there.
        rows, i = tile.own(x), groups.index[group]
        new_back, new_grads = [], []
        for (a, b), g_MF, total, (da, db) in zip(factors, g, *carry):
            g_t = tile.own(g_MF)
            # Recomputed from rows that are read anyway; keeping it from the forward pass takes [M,
            # R] for each projection and bucket.
            h = jnp.where(tile.is_own, dot(rows, at(a, i), (1, 1)), 0.0).astype(x.dtype)
            dh = jnp.where(tile.is_own, dot(g_t, at(b, i), (1, 1)), 0.0).astype(x.dtype)
            new_back.append(tile.add(total, dh))
            new_grads.append(
                (_add_at(da, i, dot(dh, rows, (0, 0))), _add_at(db, i, dot(h, g_t, (0, 0))))
            )
        return new_back, new_grads

    back = [jnp.zeros((x.shape[0], a.shape[1]), x.dtype) for a, _ in factors]
    grads = [
        tuple(blank(w.shape, jnp.float32, groups.sizes, 2 * k + i) for i, w in enumerate(pair))
        for k, pair in enumerate(factors)
    ]
    back, grads = over_tiles(body, (back, grads), x.shape[0], groups.sizes, groups.first)
    return back, [
        (da.astype(a.dtype), db.astype(b.dtype)) for (da, db), (a, b) in zip(grads, factors)
    ]


def _add_at(total: jax.Array, i: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(total, at(total, i) + part, i, 0)
