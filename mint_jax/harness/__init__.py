"""Shared parts of the recipes: settings, the workdir, adapters by name, and the records of a
training run. The programs are in ``recipes``.
"""
