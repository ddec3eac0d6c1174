"""Causal attention within packed rows, whose tokens attend to their own segment and its parent, for
training and scoring.

The forward pass stores the logarithm of each query's sum of weights, from which the backward pass
recomputes weights (FlashAttention, arXiv 2205.14135, sections 3.1 and B.2), so scores are never
stored.
"""

from pallas_kernels.packed_attention import pallas_gpu, pallas_tpu

__all__ = ["pallas_gpu", "pallas_tpu"]
