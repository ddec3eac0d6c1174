"""Slot LoRA: packed LoRA for rows in any order, which each name a slot: what serving's dense
projections add. Forward only.

``onto[m] + scale[m] (x[m] a[w]^T) b[w]`` with ``w`` the row's slot, -1 none. Nothing is gathered
for a row: a tile of rows fetches each distinct adapter once. Where the rows' inputs are split over
devices, ``shrink`` makes the inner product of a part, whose sum over the devices is R numbers a
row, and ``expand`` goes on from it. What these do not serve is the caller's, whose XLA form knows
more of the rows.

Axes: M rows, D in, F out, R rank, W slots.
"""

from pallas_kernels.slot_lora import cpu, pallas_gpu, pallas_tpu

__all__ = ["cpu", "pallas_gpu", "pallas_tpu"]
