"""Slot LoRA: packed LoRA for rows in any order that each name a slot, in serving. Forward only.

``onto[m] + scale[m] (x[m] a[w]^T) b[w]`` with ``w`` the row's slot, -1 none. Nothing is gathered
per row: a tile fetches each distinct adapter once. If inputs are split over devices, ``shrink``
computes the inner product of a part, R numbers per row, and ``expand`` continues from the sum.

Axes: M rows, D in, F out, R rank, W slots.
"""

from pallas_kernels.slot_lora import cpu, pallas_gpu, pallas_tpu

__all__ = ["cpu", "pallas_gpu", "pallas_tpu"]
