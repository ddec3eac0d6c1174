"""XLA's form of ``state_step``: the rows' states are copied out of the pool, and back."""

import jax
import jax.numpy as jnp


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    load: jax.Array,
    save: jax.Array,
    *,
    corrects: bool,
) -> tuple[jax.Array, jax.Array]:
    """Implements ``state_step``."""
    state = pool[layer, jnp.maximum(load, 0)]
    state = jnp.where((load < 0)[:, None, None, None], 0.0, state)
    state *= jnp.exp(decay)[..., None]
    if corrects:
        v = v - jnp.einsum("bnk,bnkv->bnv", k, state)
    state += k[..., None] * (v * beta[..., None])[..., None, :]
    o = jnp.einsum("bnk,bnkv->bnv", q, state)
    return o, pool.at[layer, save].set(state, mode="drop")
