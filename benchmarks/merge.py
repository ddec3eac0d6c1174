"""Merges adapters into the base: the baseline of systems without resident adapters."""

from typing import Any

import jax
import jax.numpy as jnp

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterStack
from mint_jax.models.precision import as_stored


@jax.jit
@as_stored
def merged(params: Any, stack: AdapterStack, slot: jax.Array) -> Any:
    """A second copy of the base with one slot's deltas added, ``W + scale A^T B`` (``unembed`` and
    ``embed`` left alone).

    Raises:
        UserError: weights that are held in fewer bits than products have.
    """
    if any(w.ndim > 1 and w.dtype != params["final_norm"].dtype for w in jax.tree.leaves(params)):
        raise UserError(
            "merged weights need the base's in full: set --config.as_stored=False and"
            " --config.quantise="
        )
    factors = dict(params_lib.leaves_with_path(stack.factors))

    def leaf(path: str, w: jax.Array) -> jax.Array:
        owner = path.removesuffix("/w")
        if f"{owner}/a" not in factors or w.ndim < 3:
            return w + jnp.zeros((), w.dtype)  # a copy: the baseline's weights are all its own
        a, b = factors[f"{owner}/a"][:, slot], factors[f"{owner}/b"][:, slot]
        delta = jnp.einsum("L...RD,L...RF->L...DF", a, b, preferred_element_type=jnp.float32)
        return (w.astype(jnp.float32) + stack.scale[slot] * delta).astype(w.dtype)

    return params_lib.map_with_path(leaf, params)
