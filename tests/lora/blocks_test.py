"""Planning of mixed batches: properties over any list of rows, and the factors that each block
gets.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.lora import tree
from mint_jax.lora.blocks import bind_blocks, plan_blocks
from mint_jax.lora.tree import AdapterConfig, Slot
from mint_jax.params import ParamSpec

# slot 0 is not in use: padding must not name it
SLOTS = st.none() | st.builds(Slot, st.sampled_from([1, 2, 8]), st.integers(1, 5))
FEW = st.lists(SLOTS, min_size=1, max_size=8).map(lambda rows: [r for r in rows for _ in range(6)])
# of one bucket: blocks get padded
MANY = st.lists(st.builds(Slot, st.just(8), st.integers(1, 5)), min_size=17, max_size=60)
ROWS = st.lists(SLOTS, min_size=1, max_size=40) | FEW | MANY
SPECS = {
    "dense": {
        "attn": {
            "q": {"w": ParamSpec((2, 5, 6), (None,) * 3)},
            "k": {"w": ParamSpec((2, 5, 4), (None,) * 3)},
        }
    }
}


def random_adapter(rng, config):
    return jax.tree.map(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32),
        tree.adapter_specs(SPECS, config),
    )


def owners(plan):
    """The adapter of every block, as the device will see it: buckets in order, then the base."""
    resident = [
        Slot(bucket, int(index)) for bucket in sorted(plan.slots) for index in plan.slots[bucket]
    ]
    return resident + [None] * plan.base_blocks


@settings(max_examples=300)
@given(ROWS, st.sampled_from([1, 2, 3, 4, 8]))
def test_every_row_is_placed_once_in_a_block_of_its_adapter(adapters, row_multiple):
    plan = plan_blocks(adapters, row_multiple)
    assert sorted(row for row in plan.order if row is not None) == list(range(len(adapters)))
    blocks = owners(plan)
    assert len(plan.order) == len(blocks) * plan.size
    assert len(plan.order) % row_multiple == 0
    for place, row in enumerate(plan.order):
        if row is not None:
            assert blocks[place // plan.size] == adapters[row]
    counts = [adapters.count(slot) for slot in set(adapters)]
    assert plan.size == np.gcd.reduce(counts), "blocks are as large as the numbers of rows allow"
    for bucket in plan.slots:  # padding repeats a slot in use, by at most an eighth of the blocks
        real = sum(slot is not None and slot.bucket == bucket for slot in adapters) // plan.size
        assert {Slot(bucket, int(i)) for i in plan.slots[bucket]} <= set(adapters)
        assert real <= len(plan.slots[bucket]) <= max(8, real + -(-real // 8))


def test_equal_policies_make_one_block_each_and_the_base_comes_last():
    a, b, c = Slot(8, 0), Slot(1, 1), Slot(8, 2)
    plan = plan_blocks([None, c, a, b, a, c, b, None])
    assert plan.order == [3, 6, 2, 4, 1, 5, 0, 7]
    assert plan.size == 2
    assert plan.base_blocks == 1
    assert {bucket: list(slots) for bucket, slots in plan.slots.items()} == {1: [1], 8: [0, 2]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_get_the_factors_of_their_slot_with_the_scale_in_b(dtype, rng):
    configs = {
        "x": AdapterConfig(3, 5.0, ("q",)),
        "y": AdapterConfig(4, 2.0, ("q", "k")),
        "z": AdapterConfig(1, 3.0, ("k",), rslora=True),
    }
    made = {name: (config, random_adapter(rng, config)) for name, config in configs.items()}
    stacks, slots = tree.stack_adapters(SPECS, made)
    adapters = [
        slots["y"],
        None,
        slots["x"],
        slots["x"],
        slots["z"],
        slots["y"],
        slots["x"],
        slots["y"],
        slots["x"],
        None,
    ]
    plan = plan_blocks(adapters)
    bound = bind_blocks(plan, stacks, dtype)
    assert bound.blocks == tuple(len(plan.slots[b]) for b in sorted(plan.slots))
    assert bound.base_blocks == plan.base_blocks
    names = {slot: name for name, slot in slots.items()}
    for tree_, bucket in zip(bound.buckets, sorted(plan.slots)):
        for i, index in enumerate(plan.slots[bucket]):
            config, adapter = made[names[Slot(bucket, int(index))]]
            for target in ("q", "k"):
                if target not in tree_["dense"]["attn"]:
                    assert target not in config.targets
                    continue
                got = tree_["dense"]["attn"][target]
                assert got["a"].dtype == jnp.dtype(dtype)
                if target not in config.targets:
                    assert not np.any(got["a"][:, i])
                    continue
                factors = adapter["dense"]["attn"][target]
                a = jnp.asarray(factors["a"], dtype)
                b = jnp.asarray(factors["b"] * np.float32(config.scale), dtype)
                np.testing.assert_array_equal(got["a"][:, i, : config.rank], a)
                np.testing.assert_array_equal(got["b"][:, i, : config.rank], b)
                assert not np.any(got["b"][:, i, config.rank :])


def test_rows_of_the_bare_base_bind_nothing():
    assert bind_blocks(plan_blocks([None, None]), {}, jnp.float32) is None
