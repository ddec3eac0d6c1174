"""Kernels for the adapters' products; each op is a package with a reference, a form for XLA and one
for each accelerator.

Imports jax alone. Which form runs is ``dispatch``'s matter, and what happens under ``vmap`` is each
op's own rule.
"""
