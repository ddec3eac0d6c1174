"""Grouped products under ``vmap`` against each policy alone, values and gradients, and how many
products there are.

Axes: P policies, M rows of one policy, G groups, W matrices of one policy, K in, N out, R rank.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.models import packed_lora
from mint_jax.models.grouped import grouped_matmul
from mint_jax.models.packed_lora import Adapters, Groups, project
from pallas_kernels.batching import Merged
from tests.marks import first

P, M, G, W, K, N, R = 3, 29, 5, 7, 11, 13, 2
# the second has no rows behind its last group
SIZES = np.array([[4, 0, 9, 6, 1], [0, 0, 29, 0, 0], [3, 8, 0, 0, 5]], np.int32)


def _draw(rng, batched, *shape):
    return jnp.asarray(rng.normal(size=(P, *shape) if batched else shape), jnp.float32)


def _check(fn, args, axes, trained, g):
    """``vmap(vjp(fn))`` and ``vjp(vmap(fn))`` against a loop over policies.

    Args:
        axes: 0 or None for each argument.
        trained: which arguments get gradients.
        g: cotangents, one a policy.
    """

    def value_and_gradients(g, *args):
        def part(*chosen):
            full = list(args)
            for i, x in zip(trained, chosen):
                full[i] = x
            return fn(*full)

        y, vjp = jax.vjp(part, *(args[i] for i in trained))
        return y, *vjp(g)

    want, alone = [], jax.jit(value_and_gradients)
    mine = jax.tree.map(np.asarray, (g, *args))
    for p in range(P):
        want.append(
            alone(mine[0][p], *(x[p] if axis == 0 else x for x, axis in zip(mine[1:], axes)))
        )
    want = [np.stack(leaf) for leaf in zip(*want)]
    inner = jax.jit(jax.vmap(value_and_gradients, in_axes=(0, *axes)))(g, *args)
    for got, expected in zip(inner, want, strict=True):
        # tiles add in another order
        np.testing.assert_allclose(
            got, expected, rtol=0, atol=1e-5 * np.abs(expected).max(initial=1.0)
        )

    @jax.jit
    def of_all(g, *args):
        def part(*chosen):
            full = list(args)
            for i, x in zip(trained, chosen):
                full[i] = x
            return jax.vmap(fn, in_axes=axes)(*full)

        y, vjp = jax.vjp(part, *(args[i] for i in trained))
        return y, *vjp(g)

    want = [want[0], *(leaf if axes[i] == 0 else leaf.sum(0) for i, leaf in zip(trained, want[1:]))]
    for got, expected in zip(of_all(g, *args), want, strict=True):
        np.testing.assert_allclose(
            got, expected, rtol=0, atol=1e-5 * np.abs(expected).max(initial=1.0)
        )


PRODUCTS = {  # whose x, matrices and sizes are each policy's own; the index, if there is one
    "one base for all": (True, False, True, None),
    "the rows alone": (True, False, False, None),
    "the same rows": (False, False, True, None),
    "one base with an index": (True, False, True, "shared"),
    "one base, each its own index": (True, False, True, "own"),
    "own matrices": (True, True, True, None),
    "own matrices for the same rows": (False, True, False, None),
    "own matrices and one index": (True, True, True, "shared"),
    "own matrices and indices": (True, True, False, "own"),
}


@pytest.mark.parametrize(
    ("own", "transposed"), zip(PRODUCTS.values(), itertools.cycle([False, True])), ids=PRODUCTS
)
def test_products_of_policies_are_those_of_each(own, transposed, rng):
    *batched, index = own
    x, w = (
        _draw(rng, own[0], M, K),
        _draw(rng, own[1], W if index else G, *((N, K) if transposed else (K, N))),
    )
    sizes, drawn = (
        jnp.asarray(SIZES if own[2] else SIZES[0]),
        np.stack([rng.permutation(W)[:G] for _ in range(P)]).astype(np.int32),
    )
    indices = {None: None, "shared": drawn[0], "own": drawn}[index]
    axes = (*(0 if mine else None for mine in batched), 0 if index == "own" else None)
    fn = functools.partial(grouped_matmul, transposed=transposed)
    _check(fn, (x, w, sizes, indices), axes, (0, 1), _draw(rng, True, M, N))


def _adapted(x, w, a, b, sizes, index, contiguous=False):
    """A projection whose groups of adapters are the experts, each with the factors of ``index``."""
    first, row = jnp.cumsum(sizes) - sizes, jnp.arange(x.shape[0], dtype=jnp.int32)
    group = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
    index = jnp.asarray(index)
    factor = jnp.where(group < sizes.shape[0], index[jnp.minimum(group, sizes.shape[0] - 1)], -1)
    return project(
        x, [{"w": w}], sizes, [Adapters(Groups(first, sizes, index, factor, contiguous), ((a, b),))]
    )[0]


PACKED = {  # whose x, base, A, B, sizes and index are each policy's own
    "a policy each": (True, False, True, True, True, False),
    "one policy for all": (True, False, False, False, True, False),
    "one policy, the same rows": (False, False, False, False, True, False),
    "own A and index": (False, False, True, False, True, True),
    "own B": (True, False, False, True, False, False),
    "own bases": (True, True, True, True, True, False),
}


@pytest.mark.parametrize(
    "own",
    [
        own if k % 3 == 0 else pytest.param(own, marks=pytest.mark.long)
        for k, own in enumerate(PACKED.values())
    ],
    ids=PACKED,
)
@pytest.mark.parametrize(
    "rank", [R, pytest.param(packed_lora.FEW_TERMS + 1, marks=pytest.mark.long)]
)
def test_adapted_projections_of_policies_are_those_of_each(own, rank, rng):
    shapes = (M, K), (G, K, N), (W, rank, K), (W, rank, N)
    sizes, index = (
        jnp.asarray(SIZES),
        np.stack([rng.permutation(W)[:G] for _ in range(P)]).astype(np.int32),
    )
    args = (
        *(_draw(rng, mine, *shape) for mine, shape in zip(own, shapes)),
        sizes if own[4] else sizes[0],
        index if own[5] else index[0],
    )
    _check(
        _adapted,
        args,
        tuple(0 if mine else None for mine in own),
        (0, 1, 2, 3),
        _draw(rng, True, M, N),
    )


@pytest.mark.parametrize("contiguous", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rules_hold_for_the_form_of_accelerators(contiguous, rng, form_of_accelerators):
    index = jnp.arange(G, dtype=jnp.int32)
    args = (
        _draw(rng, True, M, K),
        _draw(rng, False, G, K, N),
        _draw(rng, True, G, R, K),
        _draw(rng, True, G, R, N),
        jnp.asarray(SIZES),
        index,
    )
    fn = functools.partial(_adapted, contiguous=contiguous)
    _check(fn, args, (0, None, 0, 0, 0, None), (0, 1, 2, 3), _draw(rng, True, M, N))


def _spoilt(args, own, value):
    """The arguments with a number that is not finite in all that is the second policy's own."""
    return [
        x.at[1, -1, -1].set(value) if mine and jnp.issubdtype(x.dtype, jnp.floating) else x
        for x, mine in zip(args, own)
    ]


@pytest.mark.parametrize("form", first(1, ["cpu", "accelerators"]))
@pytest.mark.parametrize("kind", ["a policy each", "own A and index", "own bases"])
def test_a_policy_that_is_not_finite_is_alone(kind, form, rng, request):
    if form == "accelerators":
        request.getfixturevalue("form_of_accelerators")
    own = PACKED[kind]
    shapes = (M, K), (G, K, N), (W, R, K), (W, R, N)
    sizes, index = (
        jnp.asarray(SIZES),
        np.stack([rng.permutation(W)[:G] for _ in range(P)]).astype(np.int32),
    )
    drawn = (
        *(_draw(rng, mine, *shape) for mine, shape in zip(own, shapes)),
        sizes if own[4] else sizes[0],
        index if own[5] else index[0],
    )
    g, trained = _draw(rng, True, M, N), [i for i in range(4) if own[i]]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, *(0 if mine else None for mine in own)))
    def run(g, *args):
        def part(*chosen):
            return _adapted(
                *(chosen[trained.index(i)] if i in trained else x for i, x in enumerate(args))
            )

        y, vjp = jax.vjp(part, *(args[i] for i in trained))
        return y, *vjp(g)

    want = run(g, *drawn)
    for value in (jnp.nan, jnp.inf):
        spoilt = _spoilt(drawn, own, value)
        for args in (spoilt, *([*drawn[:i], spoilt[i], *drawn[i + 1 :]] for i in trained)):
            for cotangents in (g, g.at[1, 2].set(value)):
                for got, expected in zip(run(cotangents, *args), want, strict=True):
                    np.testing.assert_array_equal(got[::2], expected[::2])


def test_vmap_of_vmap_merges_both(rng):
    x, w, sizes = (
        _draw(rng, True, 2, M, K),
        _draw(rng, False, G, K, N),
        jnp.asarray(np.stack([SIZES, SIZES[::-1]], axis=1)),
    )
    fn = jax.vmap(jax.vmap(grouped_matmul, in_axes=(0, None, 0)), in_axes=(0, None, 0))
    got = jax.jit(fn)(x, w, sizes)
    for p, q in np.ndindex(P, 2):
        # float32 sums of 11 terms
        np.testing.assert_allclose(got[p, q], grouped_matmul(x[p, q], w, sizes[p, q]), atol=1e-5)
    assert str(jax.make_jaxpr(fn)(x, w, sizes)).count("ragged_dot_general") == 1
    assert f"f32[{2 * P * M},{K}]" in str(jax.make_jaxpr(fn)(x, w, sizes))


@pytest.mark.parametrize("by_group", [False, True])
def test_merged_rows_are_sorted_and_come_back(by_group, rng):
    x = _draw(rng, True, M, K)
    rows = Merged(jnp.asarray(SIZES), M, by_group)
    np.testing.assert_array_equal(rows.back(rows.take(x, True)), x)
    group = np.stack([np.repeat(np.arange(G + 1), [*sizes, M - sizes.sum()]) for sizes in SIZES])
    policy = np.broadcast_to(np.arange(P)[:, None], (P, M))
    # the last is the first to sort by
    keys = (policy, group, group == G) if by_group else (group, policy, group == G)
    np.testing.assert_array_equal(rows.source, np.lexsort([k.ravel() for k in keys]))
    np.testing.assert_array_equal(rows.take(x[0], False), x[0][np.asarray(rows.source) % M])


def test_many_policies_in_a_scan_and_recomputed_are_one_product_a_layer(rng):
    """The shared matrices are neither copied nor multiplied once a policy, whatever surrounds the
    product.
    """
    layers = 4
    w = jnp.asarray(rng.normal(0, K**-0.5, (layers, G, K, K)), jnp.float32)
    a, b = (jnp.asarray(rng.normal(0, 0.3, (P, layers, G, R, K)), jnp.float32) for _ in range(2))
    x, sizes, index = _draw(rng, True, M, K), jnp.asarray(SIZES), jnp.arange(G, dtype=jnp.int32)

    def loss(w, adapter, x, sizes):
        @jax.checkpoint
        def layer(x, inputs):
            w, (a, b) = inputs
            return jnp.tanh(_adapted(x, w, a, b, sizes, index)), None

        return jnp.sum(jax.lax.scan(layer, x, (w, adapter))[0] ** 2)

    grad = jax.value_and_grad(loss, (1, 2))
    many = jax.jit(jax.vmap(grad, in_axes=(None, 0, 0, 0)))
    got = many(w, (a, b), x, sizes)
    for p in range(P):
        want = jax.jit(grad)(w, (a[p], b[p]), x[p], sizes[p])
        for ours, alone in zip(
            jax.tree.leaves(jax.tree.map(lambda v, p=p: v[p], got)),
            jax.tree.leaves(want),
            strict=True,
        ):
            # float32, 4 layers
            np.testing.assert_allclose(
                ours, alone, rtol=0, atol=1e-5 * np.abs(alone).max(initial=1.0)
            )
    text = str(jax.make_jaxpr(many)(w, (a, b), x, sizes))
    assert f"[{P},{G},{K},{K}]" not in text
    assert f"[{P * G},{K},{K}]" not in text
