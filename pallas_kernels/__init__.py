"""Kernels for the adapters' matmuls. Each op is a package with a reference, an XLA form and a form
for each accelerator.

Imports jax only. ``dispatch`` selects the implementation; each op has its own batching rule.
"""
