"""Projections of routed experts with packed adapters: a grouped matmul plus each row's low-rank
one.

``y[m] = x[m] W[e] + (x[m] A[g]^T) B[g]`` with rows sorted by expert e and group g = (expert,
adapter): kernels of ``pallas_kernels`` on TPUs and NVIDIA GPUs where they apply, else grouped
matmuls, and on CPUs loops over tiles of a group's rows.

Axes: M rows, E experts, G groups, W adapter factors, D in, F out, R rank. arXiv 2106.09685, section
4.1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from mint_jax.models.config import Kernels
from pallas_kernels import packed_lora as op
from pallas_kernels import packed_matmul
from pallas_kernels.dispatch import Implementation, anything, named, run
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.tiles import schedule
from pallas_kernels.grouped_matmul.xla import finite, group_of_rows
from pallas_kernels.packed_lora import halves
from pallas_kernels.products import dot

# Average rows of an expert up to which packed matmul on TPU also serves rows without adapters: one
# tile. It reads whole stacks and 8-bit matrices in place, of which ``ragged_dot`` needs a copy that
# has more bytes than such rows. Not measured on a TPU.
FEW_ROWS = 128
# Rows of a tile: a multiple of STEP, about MAX_TILE at most. A tile costs a pass over its matrix,
# so small tiles read the experts repeatedly; rows past a group's end are wasted work. On two
# AVX-512 cores, float32, 2,048 rows and matrices of 512 x 256: for 128 experts tiles of 24 rows
# (chosen here) take 17 ms, of 8 rows 27, of 160 rows 33, of 512 rows 70; for 16 experts tiles of
# 152 rows (chosen) 5 ms, of 8 rows 14, of 512 rows 9. ``ragged_dot`` takes 518 and 88 ms.
STEP, MAX_TILE = 8, 160


@struct.dataclass
class Groups:
    """Assignment of rows to factors."""

    first: jax.Array  # `[G]` int32 first row of each group, ascending
    sizes: jax.Array  # `[G]` int32 rows of each group
    index: jax.Array  # `[G]` int32 factors of each group, all different
    factor: jax.Array  # `[M]` int32 factors of each row; -1 for rows of no group
    # rows of no group all come after the others
    contiguous: bool = struct.field(pytree_node=False, default=False)


Factors = tuple[jax.Array, jax.Array]  # A [W, R, D], B [W, R, F]


class Adapters(NamedTuple):
    """The adapters of one rank bucket."""

    groups: Groups  # their rows
    # of each projection; None if these adapters do not target it
    factors: tuple[Factors | None, ...]
    # `[M]` float32 scale of each row's adapter, if B does not include it; forward only
    scale: jax.Array | None = None


def project(
    x_MD: jax.Array,
    bases: Sequence[dict[str, jax.Array]],
    sizes_E: jax.Array,
    adapters: Sequence[Adapters],
    kernels: Kernels = Kernels(),
) -> list[jax.Array]:
    """Returns ``[M, F]`` of each projection, in the dtype of ``x``; zeros after the last expert.

    Args:
        x_MD: rows, those of expert 0 first.
        bases: for each projection ``{"w": [E, D, F]}`` and, if quantised, ``"scale": [E, F]``; with
            ``"index"``, a number, w has more matrices, and expert 0's is at that index.
        sizes_E: int32 rows of each expert.
        adapters: rank buckets.
    """
    return list(_project(kernels, x_MD, tuple(bases), sizes_E, tuple(adapters)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(kernels, x, bases, sizes, adapters):
    return _by_platform(kernels, _products_tiles, _products_kernels, x, bases, sizes, adapters)


def _forward(kernels, *args):
    return _project(kernels, *args), args


def _backward(kernels, args, g):
    dx, dfactors = _by_platform(kernels, _gradients_tiles, _gradients_kernels, *args, g)
    return dx, None, None, tuple(Adapters(None, one) for one in dfactors)  # type: ignore[arg-type]


_project.defvjp(_forward, _backward)


def _by_platform(kernels: Kernels, tiles: Any, products: Any, *args: Any) -> Any:
    default = functools.partial(products, kernels=kernels)
    # A named kernel also runs on a CPU, in interpret mode.
    if any(map(named, (kernels.packed_lora, kernels.grouped_matmul, kernels.packed_matmul))):
        return default(*args)
    return jax.lax.platform_dependent(*args, cpu=tiles, default=default)


# Accelerators: grouped matmuls over rows that are contiguous by group.


def _in_front(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Returns the order that moves rows without an adapter behind the others, and its inverse."""
    front = jnp.argsort(groups.factor < 0, stable=True)
    return front, jnp.zeros_like(front).at[front].set(jnp.arange(len(front), dtype=front.dtype))


def _grouped(x, w, groups, transposed, kernel):
    # A ragged product needs its groups' rows contiguous from the start.
    if groups.contiguous:
        return grouped_matmul(x, w, groups.sizes, groups.index, transposed, kernel)
    front, back = _in_front(groups)
    return grouped_matmul(x[front], w, groups.sizes, groups.index, transposed, kernel)[back]


_OUTER = jax.lax.RaggedDotDimensionNumbers(
    (([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def outer(left_MA: jax.Array, right_MB: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Returns each group's sum of outer products of its rows, ``[G, A, B]`` float32."""
    (left_MA, bad_left), (right_MB, bad_right) = finite(left_MA), finite(right_MB)
    sums = jax.lax.ragged_dot_general(
        left_MA, right_MB, sizes_G, _OUTER, preferred_element_type=jnp.float32
    )
    group_M = group_of_rows(left_MA.shape[0], sizes_G)
    bad_G = jnp.zeros(sizes_G.shape, bool).at[group_M].max(bad_left | bad_right, mode="drop")
    return jnp.where(bad_G[:, None, None], jnp.nan, sums)


def _factor_gradient(left_MA, right_MB, groups, like):
    if not groups.contiguous:
        front, _ = _in_front(groups)
        left_MA, right_MB = left_MA[front], right_MB[front]
    sums_G = outer(left_MA, right_MB, groups.sizes)
    return jnp.zeros(like.shape, jnp.float32).at[groups.index].add(sums_G).astype(like.dtype)


def _scale_rows(y: jax.Array, scale_EF: jax.Array, sizes: jax.Array) -> jax.Array:
    expert_M = jnp.minimum(group_of_rows(y.shape[0], sizes), sizes.shape[0] - 1)
    return (y * scale_EF[expert_M]).astype(y.dtype)


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
        h, dh = _grouped(x, a_k, groups, True, kernel), _grouped(g_k, b_k, groups, True, kernel)
        da.append(_factor_gradient(dh, x, groups, a_k))
        db.append(_factor_gradient(h, g_k, groups, b_k))
        dx = dx + _grouped(dh, a_k, groups, False, kernel).astype(dx.dtype)
    return dx, tuple(da), tuple(db)


def _table(
    table: Sequence[Implementation], grouped: Any, groups: Groups, kernels: Kernels
) -> tuple[Implementation, ...]:
    """Returns the accelerators' kernels, with grouped products as the fallback, not runs."""
    form = functools.partial(grouped, groups=groups, kernel=kernels.grouped_matmul)
    return (*(one for one in table if one.platform), Implementation("xla", None, form, anything))


def _products_kernels(x, bases, sizes, adapters, kernels):
    adapters = list(adapters)
    one_pass = kernels.packed_matmul
    if one_pass == "auto" and {kernels.packed_lora, kernels.grouped_matmul} != {"auto"}:
        one_pass = "xla"
    first = next((n for n, one in enumerate(adapters) if all(one.factors)), None)
    if one_pass == "xla" or (first is None and not _reads_few(x, bases, sizes)):
        out = [_base_grouped(x, base, sizes, False, kernels.grouped_matmul) for base in bases]
        return tuple(_add(x, out, adapters, kernels))
    # A bucket with factors of all projections runs in the base's pass, or zero factors that no row
    # uses; other buckets are added to its result.
    if first is None:
        own, scale, factor = [], None, jnp.full(x.shape[:1], -1, jnp.int32)
        a, b = (
            [jnp.zeros((1, 8, base["w"].shape[axis]), x.dtype) for base in bases] for axis in (1, 2)
        )
    else:
        own = [adapters.pop(first)]
        factor, scale, (a, b) = own[0].groups.factor, own[0].scale, _present(own[0].factors)[1]

    def two_passes(x, w, sizes, a, b, factor, scale, place, w_scale):
        extra = {} if place is None else {"index": place}
        scales = [{}] * len(w) if w_scale is None else [{"scale": one} for one in w_scale]
        base = [
            _base_grouped(x, {"w": one} | extra | of, sizes, False, kernels.grouped_matmul)
            for one, of in zip(w, scales)
        ]
        given = [Adapters(one.groups, tuple(zip(a, b)), scale) for one in own]
        return tuple(_add(x, base, given, kernels))

    table = (
        *(one for one in packed_matmul.MATMUL if one.platform),
        Implementation("xla", None, two_passes, anything),
    )
    w = [base["w"] for base in bases]
    w_scale = [base["scale"] for base in bases] if "scale" in bases[0] else None
    args = x, w, sizes, a, b, factor, scale, bases[0].get("index"), w_scale
    return tuple(_add(x, list(run("packed_matmul", table, one_pass, args)), adapters, kernels))


def _reads_few(x: jax.Array, bases: Sequence[dict[str, jax.Array]], sizes: jax.Array) -> bool:
    """Returns True if the kernel should also run the base alone, see ``FEW_ROWS``."""
    return not {"index", "scale"}.isdisjoint(bases[0]) and x.shape[0] <= FEW_ROWS * sizes.shape[0]


def _add(x, out, adapters, kernels):
    out = list(out)
    for groups, factors, scale in adapters:
        present, (a, b) = _present(factors)
        table = _table(op.ADD, _add_grouped, groups, kernels)
        args = x, a, b, [out[k] for k in present], groups.factor, scale
        for k, y in zip(present, run("packed_lora", table, kernels.packed_lora, args)):
            out[k] = y
    return out


def _gradients_kernels(x, bases, sizes, adapters, g, kernels):
    parts = [
        _base_grouped(one, base, sizes, True, kernels.grouped_matmul) for base, one in zip(bases, g)
    ]
    dx = sum(parts[1:], parts[0])
    grads = []
    for groups, factors, _ in adapters:
        present, (a, b) = _present(factors)
        table = _table(op.BACKWARD, _back_grouped, groups, kernels)
        args = x, a, b, [g[k] for k in present], dx, groups.factor
        dx, da, db = run("packed_lora backward", table, kernels.packed_lora, args)
        given = dict(zip(present, zip(da, db)))
        grads.append(tuple(given.get(k) for k in range(len(bases))))
    return dx, tuple(grads)


def _present(factors):
    present = [k for k, pair in enumerate(factors) if pair]
    return present, tuple([factors[k][i] for k in present] for i in range(2))


# Products with one factor of adapters whose experts share the other.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def shrink(kernels: Kernels, groups: Groups, x_MD: jax.Array, a_WRD: jax.Array) -> jax.Array:
    """Returns ``x A^T``, ``[M, R]`` in the dtype of ``x``; zeros for rows of no group."""
    return _half("shrink", kernels, groups, x_MD, a_WRD)


def _shrink_backward(kernels, args, dh):
    groups, x, a = args
    dx = _half("expand", kernels, groups, dh, a, jnp.zeros_like(x))
    return None, dx, _half("outer", kernels, groups, dh, x, a)


shrink.defvjp(lambda kernels, *args: (shrink(kernels, *args), args), _shrink_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def expand(
    kernels: Kernels, groups: Groups, h_MR: jax.Array, b_WRF: jax.Array, onto_MF: jax.Array
) -> jax.Array:
    """Returns ``onto + h B``, ``[M, F]``."""
    return _half("expand", kernels, groups, h_MR, b_WRF, onto_MF)


def _expand_backward(kernels, args, g):
    groups, h, b = args
    dh = _half("shrink", kernels, groups, g, b)
    return None, dh, _half("outer", kernels, groups, h, g, b), g


expand.defvjp(lambda kernels, *args: (expand(kernels, *args), args[:3]), _expand_backward)


def _half(kind, kernels, groups, *args):
    of_kernels = functools.partial(_half_kernels, kind)
    return _by_platform(kernels, _HALVES[kind][0], of_kernels, groups, *args)


def _half_kernels(kind, groups, *args, kernels):
    form = functools.partial(_HALVES[kind][1], groups=groups, kernel=kernels.grouped_matmul)
    table = (*(one[kind] for one in halves.KERNELS), Implementation("xla", None, form, anything))
    return run(f"packed_lora {kind}", table, kernels.packed_lora, (*args, groups.factor))


def _shrink_grouped(x, w, factor, *, groups, kernel):
    return _grouped(x, w, groups, True, kernel)


def _expand_grouped(h, w, onto, factor, *, groups, kernel):
    return onto + _grouped(h, w, groups, False, kernel).astype(onto.dtype)


def _outer_grouped(left, right, like, factor, *, groups, kernel):
    return _factor_gradient(left, right, groups, like)


# CPU: loops over tiles of a group's rows, exact for any distribution of rows. XLA's CPU form of
# ``jax.lax.ragged_dot`` multiplies every row by every matrix.


def tile_rows(rows: int, groups: int) -> int:
    """Returns the rows of a tile, such that most groups of about average size fill whole tiles."""
    average = rows / max(1, groups)
    most = average + 2 * average**0.5
    tiles = max(1, math.ceil(most / MAX_TILE))
    return STEP * max(1, math.ceil(most / tiles / STEP))


class Tile:
    """One tile of a group's rows inside a loop, which leaves rows of other groups alone."""

    def __init__(self, first: jax.Array, stop: jax.Array, rows: int, M: int):
        self.start, self.rows = jnp.minimum(first, M - rows), rows
        row = self.start + jnp.arange(rows, dtype=jnp.int32)
        self.is_own = ((row >= first) & (row < stop))[:, None]

    def read(self, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.rows)

    def own(self, x: jax.Array) -> jax.Array:
        # A select on both sides of a sum: another group's row may be NaN, and 0 times NaN is NaN.
        return jnp.where(self.is_own, self.read(x), jnp.zeros((), x.dtype))

    def add(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """Adds ``part`` to this tile's own rows of ``x``."""
        old = self.read(x)
        return jax.lax.dynamic_update_slice_in_dim(
            x, jnp.where(self.is_own, (old + part).astype(x.dtype), old), self.start, 0
        )


def _over_tiles(
    body: Callable[[Tile, jax.Array, Any], Any],
    carry: Any,
    M: int,
    sizes: jax.Array,
    first: jax.Array | None = None,
) -> Any:
    """Runs ``body(tile, group, carry)`` over all tiles in order; see ``schedule``."""
    rows = min(tile_rows(M, sizes.shape[0]), M)
    first_G = jnp.cumsum(sizes) - sizes if first is None else first
    group, first_n, total = schedule(M, sizes, rows, first_G)
    stop_G = first_G + sizes

    def step(i, carry):
        return body(Tile(first_n[i], stop_G[group[i]], rows, M), group[i], carry)

    return jax.lax.fori_loop(0, total, step, carry)


def _blank(shape: tuple[int, ...], dtype: Any, sizes: jax.Array, key: int) -> jax.Array:
    """Returns zeros for a loop to write into; each buffer needs its own ``key``."""
    # A value that XLA cannot prove to be zero is not merged. With ``jnp.zeros`` the backward pass
    # of two projections of 32 experts with adapters takes 13 % longer, because each loop copies the
    # shared constant first.
    never = jnp.sum(sizes) < -key
    return jnp.broadcast_to(jnp.where(never, 1, 0).astype(dtype), shape)


def _at(w: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False)


def _products_tiles(x, bases, sizes, adapters):
    out = [_base_tiles(x, base, sizes, None, False, k) for k, base in enumerate(bases)]
    for one in adapters:
        present, (a, b) = _present(one.factors)
        for k, y in zip(present, _add_tiles(x, a, b, [out[k] for k in present], one)):
            out[k] = y
    return tuple(out)


def _gradients_tiles(x, bases, sizes, adapters, g):
    dx, grads = None, []
    for k, base in enumerate(bases):
        dx = _base_tiles(g[k], base, sizes, dx, True, k)
    for one in adapters:
        present, (a, b) = _present(one.factors)
        dx, made = _back_tiles(x, a, b, [g[k] for k in present], dx, one.groups)
        given = dict(zip(present, made))
        grads.append(tuple(given.get(k) for k in range(len(bases))))
    return dx, tuple(grads)


def _base_tiles(x, base, sizes, onto, transposed, key):
    if "scale" in base and transposed:
        x = _scale_rows(x, base["scale"], sizes)
    w, index = base["w"], base.get("index", 0)
    y = onto
    if y is None:
        y = _blank((x.shape[0], w.shape[1 if transposed else 2]), x.dtype, sizes, key)

    def body(tile, group, y):
        out = dot(tile.read(x), _at(w, index + group), (1, 1 if transposed else 0))
        if "scale" in base and not transposed:
            out = out * _at(base["scale"], group)[None]
        return tile.add(y, out)

    return _over_tiles(body, y, x.shape[0], sizes)


def _add_tiles(x, a, b, onto, adapters):
    groups, scale = adapters.groups, adapters.scale

    def body(tile, group, ys):
        rows, i, out = tile.read(x), groups.index[group], []
        for y, a_k, b_k in zip(ys, a, b):
            h = dot(rows, _at(a_k, i), (1, 1)).astype(x.dtype)
            if scale is not None:
                h = (h * tile.read(scale)[:, None]).astype(x.dtype)
            out.append(tile.add(y, dot(h, _at(b_k, i), (1, 0))))
        return out

    return _over_tiles(body, onto, x.shape[0], groups.sizes, groups.first)


def _back_tiles(x, a, b, g, dx, groups):
    def body(tile, group, carry):
        (dx, grads), i, new = carry, groups.index[group], []
        # A neighbour's row may be NaN: both sides of a sum over rows are zeroed there.
        rows = tile.own(x)
        for a_k, b_k, g_k, (da, db) in zip(a, b, g, grads):
            g_t = tile.own(g_k)
            # Recomputed from rows that are read anyway; keeping it from the forward pass takes [M,
            # R] for each projection and bucket.
            h = jnp.where(tile.is_own, dot(rows, _at(a_k, i), (1, 1)), 0.0).astype(x.dtype)
            dh = jnp.where(tile.is_own, dot(g_t, _at(b_k, i), (1, 1)), 0.0).astype(x.dtype)
            new.append((_add_at(da, i, dot(dh, rows, (0, 0))), _add_at(db, i, dot(h, g_t, (0, 0)))))
            dx = tile.add(dx, dot(dh, _at(a_k, i), (1, 0)))
        return dx, new

    grads = [
        tuple(_blank(w.shape, jnp.float32, groups.sizes, 2 * k + i) for i, w in enumerate(pair))
        for k, pair in enumerate(zip(a, b))
    ]
    dx, grads = _over_tiles(body, (dx, grads), x.shape[0], groups.sizes, groups.first)
    return dx, [
        (da.astype(a_k.dtype), db.astype(b_k.dtype)) for (da, db), a_k, b_k in zip(grads, a, b)
    ]


def _add_at(total: jax.Array, i: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(total, _at(total, i) + part, i, 0)


def _shrink_tiles(groups, x, w):
    y = _blank((x.shape[0], w.shape[1]), x.dtype, groups.sizes, 0)
    return _expand_tiles(groups, x, w, y, along=1)


def _expand_tiles(groups, h, w, onto, along=0):
    def body(tile, group, y):
        return tile.add(y, dot(tile.read(h), _at(w, groups.index[group]), (1, along)))

    return _over_tiles(body, onto, h.shape[0], groups.sizes, groups.first)


def _outer_tiles(groups, left, right, like):
    def body(tile, group, sums):
        part = dot(tile.own(left), tile.own(right), (0, 0))
        return _add_at(sums, groups.index[group], part)

    sums = _blank(like.shape, jnp.float32, groups.sizes, 0)
    sums = _over_tiles(body, sums, left.shape[0], groups.sizes, groups.first)
    return sums.astype(like.dtype)


_HALVES = {
    "shrink": (_shrink_tiles, _shrink_grouped),
    "expand": (_expand_tiles, _expand_grouped),
    "outer": (_outer_tiles, _outer_grouped),
}
