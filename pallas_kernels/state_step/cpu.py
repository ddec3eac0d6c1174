"""The CPU kernel of ``state_step`` (``native/state_step.cc``): a row's state is read and written
once, in its slots; XLA's form has ten passes over it.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import native

LANES = 16  # of the widest vectors


def require(*args: jax.Array, **_: bool) -> None:
    """Raises NotImplementedError with the reason if ``step`` cannot serve these arrays."""
    if (V := args[2].shape[-1]) % LANES:
        raise NotImplementedError(f"values of {V}, and not a multiple of {LANES}")
    native.require_one_device()
    native.require()


def step(*args: jax.Array, corrects: bool) -> tuple[jax.Array, jax.Array]:
    """Implements ``state_step``."""
    *of_rows, pool, layer, load, save = args
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (args[2], pool))
    where = (jnp.int32(x) for x in (layer, load, save))
    o, pool = native.call(
        "mint_state_step", out, *of_rows, pool, *where, aliases={5: 1}, corrects=corrects
    )
    return o, pool
