"""Location of this machine's caches: ``MINT_JAX_CACHE``, or ``~/.cache/mint_jax``."""

import os
from pathlib import Path


def folder() -> Path:
    """Returns ``MINT_JAX_CACHE``, or ``mint_jax`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    root = os.environ.get("MINT_JAX_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mint_jax"
    )
    return Path(root)
