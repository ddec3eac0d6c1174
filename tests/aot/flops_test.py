"""FLOPs counted in a jaxpr: loops, branches, gradients, rematerialisation, grouped products,
``shard_map``.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from mint_jax.aot.flops import traced_flops
from mint_jax.models import state
from mint_jax.models.attention import Segments
from pallas_kernels.state_step import xla

M, N = 16, 32
ONE = 2 * M * N * N
X, W = jax.ShapeDtypeStruct((M, N), jnp.float32), jax.ShapeDtypeStruct((N, N), jnp.float32)


def count(fn, *args, devices=1):
    return traced_flops(jax.jit(fn).trace(*args).jaxpr.jaxpr, devices)


def scanned(x, w, length=5):
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=length)[0]


def test_loops_and_branches():
    assert count(jnp.matmul, X, W) == ONE
    assert count(scanned, X, W) == 5 * ONE
    branch = lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)  # noqa: E731
    loop = lambda x, w: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ w, x)  # noqa: E731
    assert (count(branch, X, W), count(loop, X, W)) == (2 * ONE, ONE)
    assert traced_flops(jax.make_jaxpr(branch)(X, W).jaxpr, branch=min) == ONE


def test_gradients_of_frozen_weights_and_rematerialisation():
    assert count(jax.grad(lambda x, w: jnp.sum(scanned(x, w))), X, W) == 10 * ONE
    kept = jax.checkpoint(scanned, policy=jax.checkpoint_policies.nothing_saveable)
    assert count(jax.grad(lambda x, w: jnp.sum(kept(x, w))), X, W) == 15 * ONE
    assert count(jax.grad(lambda w, x: jnp.sum(scanned(x, w))), W, X) == 15 * ONE


@pytest.mark.parametrize(("argument", "times"), [(None, 1), (0, 2), (1, 2)])
def test_grouped_products(argument, times):
    groups = jax.ShapeDtypeStruct((4, N, N), jnp.float32)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def fn(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    def loss(x, w, sizes):
        return jnp.sum(jnp.sin(fn(x, w, sizes)))

    counted = fn if argument is None else jax.grad(loss, argument)
    assert count(counted, X, groups, sizes) == times * ONE


def test_a_layer_with_a_state_by_hand():
    """Two rows of two chunks of 64 tokens, then one token; 3 heads, keys of 16, values of 8."""

    def spec(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def rule(q, k, v, decay, beta):
        own = jnp.zeros((2, 128), jnp.int32)
        return state.recurrence(q, k, v, decay, beta, state.lineage(Segments(own, own)), True)

    def loss(*args):
        return jnp.sum(jnp.sin(rule(*args)))

    args = spec(2, 128, 3, 16), spec(2, 128, 3, 16), spec(2, 128, 3, 8), *(spec(2, 128, 3),) * 2
    # keys and queries with keys; both with the two states; weights and the system's inverse with
    # values; keys into the two states
    products = 2 * 2 * 64 * 64 * 16 + 2 * 2 * 64 * 16 * 16 + 2 * 2 * 64 * 64 * 8
    products += 2 * 2 * 64 * 16 * 8
    # decays to each token, from each to the ends of two lineages, and through the chunk to these
    sums = 2 * (64 + 2 * 64 + 2) * 64
    # two products join halves, of 32 times 1 to once 32 tokens
    system = sum(2 * 2 * half**3 * (32 // half) for half in (1, 2, 4, 8, 16, 32))
    assert count(rule, *args) == 2 * 3 * 2 * (products + sums + system)
    # Two gradients of each product, one of a sum, whose tokens are known, and two products of an
    # inverse.
    backward = 2 * products + sums + 2 * 2 * 64**3
    both = count(jax.grad(loss, argnums=tuple(range(5))), *args)
    assert both == 2 * 3 * 2 * (products + sums + system + backward)
    one = *(spec(2, 3, 16),) * 2, spec(2, 3, 8), spec(2, 3, 1), spec(2, 3), spec(1, 4, 3, 16, 8)
    where = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (2,), (2,)))
    step = functools.partial(xla.step, corrects=True)
    assert count(step, *one, *where) == 2 * 3 * 2 * 2 * 16 * 8


def test_shapes_inside_shard_map_are_those_of_one_device(mesh8):
    split = functools.partial(
        jax.shard_map,
        mesh=mesh8,
        in_specs=(P(("data", "fsdp", "tensor")), P()),
        out_specs=P(("data", "fsdp", "tensor")),
    )
    assert count(split(jnp.matmul), X, W, devices=8) == ONE
