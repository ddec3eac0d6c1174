"""Writes into slots: equal to ``write_slot``, whatever the rank, targets, dtype, pieces and mesh;
in place; nothing else moves.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.compiling import compilations
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, Slot
from mint_jax.models import transformer
from mint_jax.residency.slots import DeviceSlots
from tests.adapters import random_adapter


def fill(slots, slot, adapter, config) -> int:
    staged = slots.stage(slot, adapter, config)
    calls = 1
    while not slots.write(staged):
        calls += 1
    return calls


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("piece_bytes", [None, 3000])
def test_a_write_equals_write_slot_and_leaves_other_slots_alone(
    rng, tiny_base, family, piece_bytes
):
    specs = transformer.abstract(tiny_base(family).cfg)
    linear = [t for t in lora_tree.target_paths(specs) if t not in lora_tree.UNUSUAL]
    first = AdapterConfig(3, 6.0, tuple(linear))
    second = AdapterConfig(4, 2.0, tuple(linear[1:3]), rslora=True)
    slots = DeviceSlots(specs, {4: 3}, piece_bytes=piece_bytes)
    expected = lora_tree.empty_stack(specs, [lora_tree.ALL_LINEAR], 4, 3)
    # slot 1 twice: what was there must be gone
    for index, config in [(1, first), (2, second), (1, second), (0, first)]:
        adapter = random_adapter(rng, specs, config)
        calls = fill(slots, Slot(4, index), adapter, config)
        assert (calls > 1) == (piece_bytes is not None and params_lib.nbytes(adapter) > piece_bytes)
        expected = lora_tree.write_slot(expected, index, adapter, config.scale)
        found = slots.stacks[4]
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        chex.assert_trees_all_equal(found, expected)


def test_stacks_may_be_stored_in_half_the_bytes(rng, tiny_base):
    specs, config = transformer.abstract(tiny_base().cfg), AdapterConfig(2, 4.0, ("q", "down"))
    slots = DeviceSlots(specs, {2: 2}, config.targets, jnp.bfloat16)
    assert slots.slot_bytes(2) == lora_tree.adapter_nbytes(specs, config) // 2
    for dtype in (np.float32, jnp.bfloat16, np.float16):
        adapter = jax.tree.map(lambda x: x.astype(dtype), random_adapter(rng, specs, config))  # noqa: B023
        fill(slots, Slot(2, 1), adapter, config)
        found = lora_tree.read_slot(slots.stacks[2], 1)
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, np.asarray(y).astype(jnp.bfloat16)),
            found,
            adapter,
        )


def test_writes_are_in_place_and_a_second_adapter_of_the_same_shapes_compiles_nothing(
    rng, tiny_base
):
    specs, config = transformer.abstract(tiny_base().cfg), AdapterConfig(2, 4.0, ("q", "v"))
    slots = DeviceSlots(specs, {2: 4}, config.targets)
    adapters = [random_adapter(rng, specs, config) for _ in range(3)]
    fill(slots, Slot(2, 0), adapters[0], config)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(slots.stacks[2].factors)]
    held = slots.stacks
    with compilations() as seen:
        for index in (3, 1):
            fill(slots, Slot(2, index), adapters[index - 1], AdapterConfig(2, 9.0, ("q", "v")))
    assert seen == []
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(slots.stacks[2].factors)] == where
    assert held is slots.stacks


def test_on_a_mesh_slots_are_split_as_the_base_and_hold_the_same(rng, tiny_base, mesh8):
    specs = transformer.abstract(tiny_base("llama").cfg)
    config = AdapterConfig(3, 6.0, ("q", "o", "up", "down"))
    adapter = random_adapter(rng, specs, config)
    one = DeviceSlots(specs, {4: 2}, config.targets)
    eight = DeviceSlots(specs, {4: 2}, config.targets, mesh=mesh8)
    for slots in (one, eight):
        fill(slots, Slot(4, 1), adapter, config)
        fill(slots, Slot(4, 0), adapter, config)
    chex.assert_trees_all_equal(one.stacks[4], eight.stacks[4])
    split = eight.stacks[4].factors["dense"]["mlp"]["up"]["b"]
    assert split.addressable_shards[0].data.size == split.size // 2, (
        "up's outputs are split over tensor"
    )
