"""Views of adapters that tests hold themselves, outside any resident stack."""

from typing import Any

import jax
import jax.numpy as jnp

from mint_jax.lora.tree import AdapterStack
from mint_jax.lora.view import AdapterView, attach_blocks


def view_of(parts: Any, base_blocks: int = 0) -> AdapterView:
    """Consecutive blocks of rows, of each bucket ``(factors [L, P, R, ...], scale [P])``."""
    stacks = {
        i: AdapterStack(jax.tree.map(jnp.asarray, factors), jnp.asarray(scale), i)
        for i, (factors, scale) in enumerate(parts)
    }
    slots = {i: jnp.arange(stack.slots) for i, stack in stacks.items()}
    return attach_blocks(stacks, slots, base_blocks=base_blocks)


def view_of_one(adapter: Any, scale: Any = 1.0) -> AdapterView:
    """One adapter for all rows."""
    return view_of([(jax.tree.map(lambda x: jnp.asarray(x)[:, None], adapter), jnp.full(1, scale))])
