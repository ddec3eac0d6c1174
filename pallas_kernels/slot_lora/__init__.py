"""Slot LoRA: packed LoRA for rows in any order that each name a slot, for the dense projections in
serving. Forward only.

``onto[m] + scale[m] (x[m] a[w]^T) b[w]`` with ``w`` the row's slot, -1 none. Nothing is gathered
per
row: a tile of rows fetches each distinct adapter once. If the rows' inputs are split over devices,
``shrink`` computes the inner product of a part, whose sum over the devices is R numbers per row,
and ``expand`` continues from it. Unsupported inputs are left to the caller's XLA form.

Axes: M rows, D in, F out, R rank, W slots.
"""

from pallas_kernels.slot_lora import cpu, pallas_gpu, pallas_tpu

__all__ = ["cpu", "pallas_gpu", "pallas_tpu"]
