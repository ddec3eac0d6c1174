"""Ordering of a mixed batch into blocks of equal size with one adapter each."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mint_jax.data.buckets import round_up
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.lora.view import AdapterView, attach_blocks


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """An order of rows in which each block of ``size`` consecutive rows has one adapter."""

    # indices of the given rows: blocks by bucket and slot, then rows without an adapter; None is
    # padding
    order: list[int | None]
    size: int
    slots: dict[int, np.ndarray]  # slot of each block, by bucket
    base_blocks: int  # number of blocks at the end without an adapter


def plan_blocks(adapters: Sequence[Slot | None], row_multiple: int = 1) -> BlockPlan:
    """Plans a batch of rows that each name an adapter; their number is a multiple of
    ``row_multiple``.

    The number of blocks of each bucket is rounded up, so that batches share few compiled shapes.
    """
    members: dict[Slot | None, list[int]] = {}
    for row, slot in enumerate(adapters):
        members.setdefault(slot, []).append(row)
    # Larger blocks are larger matmuls, so the size is the greatest common divisor of the adapters'
    # row counts: the group size for rollouts of equal groups, one row for unrelated requests.
    size = int(np.gcd.reduce([len(rows) for rows in members.values()]))
    order: list[int | None] = []
    slots: dict[int, np.ndarray] = {}
    resident = sorted(slot for slot in members if slot is not None)
    for bucket in sorted({slot.bucket for slot in resident}):
        own = [slot for slot in resident if slot.bucket == bucket]
        blocks = [slot.index for slot in own for _ in range(len(members[slot]) // size)]
        padding = round_up(len(blocks)) - len(blocks)
        order += [row for slot in own for row in members[slot]] + [None] * (padding * size)
        slots[bucket] = np.array(blocks + blocks[-1:] * padding, np.int32)
    bare = members.get(None, [])
    base_blocks = round_up(len(bare) // size) if bare else 0
    order += bare + [None] * (base_blocks * size - len(bare))
    while len(order) % row_multiple:
        order += [None] * size
        base_blocks += 1
    return BlockPlan(order, size, slots, base_blocks)


def bind_blocks(plan: BlockPlan, stacks: Stacks, dtype: Any) -> AdapterView | None:
    """Binds resident adapters to a plan's blocks; None if no row has an adapter."""
    if not plan.slots:
        return None
    return attach_blocks(stacks, plan.slots, base_blocks=plan.base_blocks, dtype=dtype)
