"""Causal attention within packed rows, whose tokens see their own segment and its parent: what
training and scoring need.

The forward pass leaves the logarithm of each query's sum of weights, from which the backward pass
computes weights again (FlashAttention, arXiv 2205.14135, sections 3.1 and B.2), so that no scores
are ever stored.
"""

from pallas_kernels.packed_attention import pallas_gpu, pallas_tpu

__all__ = ["pallas_gpu", "pallas_tpu"]
