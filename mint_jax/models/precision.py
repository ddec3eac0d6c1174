"""Products as exact as the base is stored: what is float32 is multiplied as float32 on every
device.

Unless a product asks for more, a TPU multiplies float32 operands in one pass of bfloat16, eight
bits of each, and recent NVIDIA GPUs in TF32, eleven; the CPU is exact as it is. A float32 base asks
for ``highest``: on a TPU six passes of bfloat16 instead of one. A bfloat16 base asks for nothing,
for one pass is exact there. A user who sets ``jax_default_matmul_precision`` (``bfloat16_3x``, say:
half the passes) has chosen already and is left alone.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Program = TypeVar("Program", bound=Callable[..., Any])


def as_stored(program: Program) -> Program:
    """``program(params, ...)`` whose products, backward ones too, are as exact as ``params`` are
    stored.

    For whole programs, below ``jax.jit``: a backward pass that is traced outside would not know.
    """

    @functools.wraps(program)
    def traced(params: Any, *args: Any, **kwargs: Any) -> Any:
        with _precision(params["final_norm"].dtype):
            return program(params, *args, **kwargs)

    return traced  # type: ignore[return-value]


def _precision(dtype: Any) -> contextlib.AbstractContextManager[Any]:
    if dtype != jnp.float32 or jax.config.jax_default_matmul_precision is not None:  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")
