"""A frozen projection plus its adapters' deltas: the one seam between base and adapters."""

from typing import Any

import jax

from mint_jax.lora.apply import BoundAdapters, batch_delta
from mint_jax.models import quantised
from mint_jax.params import ParamSpec


def matrix(L: int, d_in: int, d_out: int, axes: tuple[str, str], dtype: Any, bias: bool = False) -> dict[str, ParamSpec]:
    """The specs of one projection in ``L`` stacked layers: ``w [L, in, out]`` and, if asked for, ``b [L, out]``."""
    leaf = {"w": ParamSpec((L, d_in, d_out), ("layers", *axes), dtype)}
    if bias:
        leaf["b"] = ParamSpec((L, d_out), ("layers", axes[1]), dtype, "zeros")
    return leaf


def project(x_BTD: jax.Array, params: dict[str, Any], lora: BoundAdapters | None, name: str) -> jax.Array:
    """``x W + bias + delta``, ``[B, T, F]``.

    The base product runs once over all rows of all policies; ``params[name]`` is ``{"w": [D, F]}`` with an optional
    ``"b": [F]``, or quantised, see ``quantised.py``, and ``lora`` holds this layer's adapters.
    """
    with jax.named_scope(name):
        leaf = params[name]
        y = quantised.matmul(x_BTD, leaf).astype(x_BTD.dtype)
        if "b" in leaf:
            y = y + leaf["b"].astype(y.dtype)[None, None]
        if lora is not None:
            delta = batch_delta(x_BTD, lora.at(name), leaf["w"].shape[-1])
            if delta is not None:
                y = y + delta
        return y
