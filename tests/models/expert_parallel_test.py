"""Experts over eight devices equal one device, forward and backward, whichever way tokens travel
and however skewed they are.

Axes: T tokens, E experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import sharding
from mint_jax.mesh import make_mesh
from mint_jax.models import expert_parallel
from tests.marks import first
from tests.models.experts_test import EACH, OUTER, problem
from tests.models.experts_test import _assert_close as _assert_equal
from tests.models.experts_test import _ours as _run

E, T = 16, 7
MESHES = {
    # adapters are summed over data; tensor holds the same tokens
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "expert4-tensor2": {"expert": 4, "tensor": 2},
    "tensor8": {"tensor": 8},  # every device holds all tokens
    "fsdp4-expert2": {"fsdp": 4, "expert": 2},  # 12 rows on 8 ways
}
SOME = [
    name if name == "expert4-tensor2" else pytest.param(name, marks=pytest.mark.long)
    for name in MESHES
]
WAYS = {"gather": 1 << 30, "all_to_all": 0}  # -> GATHER_TOKENS


def _problem(rng, routing="random", rows=2):
    """Two rank buckets and a base block, ``rows`` rows each; the second bucket has adapters whose
    experts share factors too.
    """
    forms = EACH, EACH + OUTER
    x, ids, *others = problem(rng, {2: 2, 4: 1}, 1, {}, rows, E, T, forms)
    if routing == "one_expert":  # everybody's only visit
        ids[:] = -1
        ids[..., 0] = 5
    elif routing == "one_device":  # where it meets two experts
        ids[:] = np.array([2, 3, -1])
    return x, jnp.asarray(ids), *others


def _of_stack(p, mesh):
    """The experts as the second layer of a stack, as a model has them, split over the mesh; the
    first layer's are NaN.
    """
    whole, number = (
        jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in ((None, *sharding.partition(("experts",), mesh)), ())
    )
    stacks = {n: jnp.stack([jnp.full_like(leaf["w"], jnp.nan), leaf["w"]]) for n, leaf in p.items()}
    return {
        n: {"w": jax.device_put(w, whole), "layer": jax.device_put(jnp.int32(1), number)}
        for n, w in stacks.items()
    }


def _over_mesh(sizes, x, ids, weights, p, lora, g):
    mesh = make_mesh(sizes)
    split = sharding.partition(("experts",), mesh)
    p = _of_stack(p, mesh)
    of_experts, whole = (
        jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((None, *split), ())
    )
    factors = jax.tree.map(lambda x: whole if x.ndim == 3 else of_experts, lora)
    lora = jax.device_put(lora, factors)
    with jax.set_mesh(mesh):
        y, grads = _run(x, ids, weights, p, lora, g)
        assert all(
            leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
            for leaf, wanted in zip(jax.tree.leaves(grads[2]), jax.tree.leaves(factors))
        ), "gradients stay with their experts"
        return jax.device_get((y, grads))


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Makes all tokens travel one way, and checks that they do."""
    monkeypatch.setattr(expert_parallel, "GATHER_TOKENS", WAYS[request.param])
    _run.clear_cache()
    choose, chosen = expert_parallel._exchange, []
    monkeypatch.setattr(
        expert_parallel, "_exchange", lambda *args: chosen.append(choose(*args)) or chosen[-1]
    )
    yield chosen
    assert chosen
    assert all((exchange.blocks == 0) == (request.param == "gather") for exchange in chosen)
    _run.clear_cache()


@pytest.mark.long
@pytest.mark.parametrize("sizes", SOME)
def test_eight_devices_equal_one(sizes, way, rng):
    problem = _problem(rng, rows=3)
    _assert_equal(_over_mesh(MESHES[sizes], *problem), jax.device_get(_run(*problem)))


@pytest.mark.long
@pytest.mark.parametrize("routing", first(1, ["one_expert", "one_device"]))
def test_no_token_is_dropped_when_all_go_to_one_place(routing, way, rng):
    problem = _problem(rng, routing, rows=4)
    _assert_equal(_over_mesh(MESHES["expert4-tensor2"], *problem), jax.device_get(_run(*problem)))
    visits = 16 * T // 8  # a device's share of the tokens, all for one other device
    assert all(exchange.capacity < visits for exchange in way if exchange.blocks), (
        "one round must not be enough"
    )


@pytest.mark.parametrize("sizes", SOME)
def test_another_policy_s_routing_changes_no_bit(sizes, way, rng):
    """Which round a token travels in, and what is added in which order, follows from its own
    policy's tokens.
    """
    x, ids, weights, p, lora, g = _problem(rng, rows=4)
    mine = np.arange(len(x)) // 4 != 1
    y, grads = _over_mesh(MESHES[sizes], x, ids, weights, p, lora, g)
    # the second block's all go to one device or two
    crowded = jnp.where(mine[:, None, None], ids, jnp.array([0, 1, 2]))
    other_y, other_grads = _over_mesh(MESHES[sizes], x, crowded, weights, p, lora, g)
    for got, want in (
        (other_y[mine], y[mine]),
        (other_grads[0][mine], grads[0][mine]),
        (other_grads[1][mine], grads[1][mine]),
    ):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(jax.tree.leaves(other_grads[2]), jax.tree.leaves(grads[2])):
        # that block is the second of the first bucket
        others = [i for i in range(len(got)) if not (len(got) == 2 and i == 1)]
        np.testing.assert_array_equal(got[np.array(others)], want[np.array(others)])
