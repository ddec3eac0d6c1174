"""Planning of mixed batches: properties over any list of rows, and the factors that each block
gets.
"""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.lora.tree import Slot
from mint_jax.lora.view import bind_blocks, plan_blocks

# slot 0 is not in use: padding must not name it
SLOTS = st.none() | st.builds(Slot, st.sampled_from([1, 2, 8]), st.integers(1, 5))
FEW = st.lists(SLOTS, min_size=1, max_size=8).map(lambda rows: [r for r in rows for _ in range(6)])
# of one bucket: blocks get padded
MANY = st.lists(st.builds(Slot, st.just(8), st.integers(1, 5)), min_size=17, max_size=60)
ROWS = st.lists(SLOTS, min_size=1, max_size=40) | FEW | MANY


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


def test_rows_of_the_bare_base_bind_nothing():
    assert bind_blocks(plan_blocks([None, None]), {}, jnp.float32) is None
