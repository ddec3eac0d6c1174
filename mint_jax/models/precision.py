"""Matmul precision of a program: float32 weights are multiplied as float32 on every device.

By default a TPU multiplies float32 in one pass of bfloat16, and recent NVIDIA GPUs in TF32. A
float32 base sets ``highest``, on a TPU six passes of bfloat16; a bfloat16 base is exact in one. A
``jax_default_matmul_precision`` of the user has priority.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Program = TypeVar("Program", bound=Callable[..., Any])


def as_stored(program: Program) -> Program:
    """Wraps a whole program ``program(params, ...)``, below ``jax.jit``, backward pass included."""

    # A backward pass that is traced outside would have the default precision.
    @functools.wraps(program)
    def traced(params: Any, *args: Any, **kwargs: Any) -> Any:
        own: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        is_exact = own is None and params["final_norm"].dtype == jnp.float32
        with jax.default_matmul_precision("highest" if is_exact else own):
            return program(params, *args, **kwargs)

    return traced  # type: ignore[return-value]
