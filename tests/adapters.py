"""Random adapters."""

import jax
import numpy as np

from mint_jax.lora import tree
from mint_jax.models import transformer


def biased_targets(specs):
    """All targets of a base that take a bias."""
    of = {
        name: paths for name, paths in tree.target_paths(specs).items() if name not in tree.TABLES
    }
    without = ("/experts/", "/kv_b")
    return tuple(n for n, paths in of.items() if not any(w in p for p in paths for w in without))


def random_adapter(rng, base, config, size=0.5):
    """Factors of one adapter of a base, or of a base's shapes: the norm of a row is about
    ``size``.
    """
    specs = transformer.abstract(base.cfg) if hasattr(base, "cfg") else base
    draw = lambda spec: rng.normal(0, size * spec.shape[-1] ** -0.5, spec.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, tree.adapter_specs(specs, config))
