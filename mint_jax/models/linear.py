"""A frozen projection plus its adapters' deltas: the only place where base and adapters meet."""

from typing import Any

import jax

from mint_jax.lora.slot_kernel import Ends
from mint_jax.lora.view import AdapterView, add_deltas
from mint_jax.models import quantised, stored
from mint_jax.models.stacked import LayerOf, products
from mint_jax.params import ParamSpec

AXES: dict[str, Ends] = {  # logical axes of every projection's in and out dimensions
    "q": ("embed", "q_heads"),
    "k": ("embed", "kv_heads"),
    "v": ("embed", "kv_heads"),
    "o": ("q_heads", "embed"),
    "q_a": ("embed", "latent"),
    "q_b": ("latent", "q_heads"),
    "kv_a": ("embed", "latent"),
    "kv_b": ("latent", "q_heads"),
    "gate": ("embed", "ffw"),
    "up": ("embed", "ffw"),
    "down": ("ffw", "embed"),
    "router": ("embed", None),
}


def matrix(
    name: str, L: int, d_in: int, d_out: int, dtype: Any, bias: bool = False
) -> dict[str, ParamSpec]:
    """Returns the specs of a projection in ``L`` layers: ``w [L, in, out]`` and perhaps ``b [L,
    out]``.
    """
    leaf = {"w": ParamSpec((L, d_in, d_out), ("layers", *AXES[name]), dtype)}
    if bias:
        leaf["b"] = ParamSpec((L, d_out), ("layers", AXES[name][1]), dtype, "zeros")
    return leaf


def project(
    x_BTD: jax.Array, params: dict[str, Any], lora: AdapterView | None, name: str
) -> jax.Array:
    """Returns ``x W + bias + delta``, ``[B, T, F]``, in one matmul over all rows of all policies.

    ``params[name]`` is ``{"w": [D, F]}`` or a ``stacked.LayerOf``, with an optional ``"b": [F]``,
    or in the form of ``quantised.py`` or ``stored.py``; ``lora`` has this layer's adapters.
    """
    return project_each(x_BTD, params, lora, (name,))[0]


def project_each(
    x_BTD: jax.Array, params: dict[str, Any], lora: AdapterView | None, names: tuple[str, ...]
) -> list[jax.Array]:
    """Runs ``project`` for projections of the same rows, in one call if read from stacks."""
    whole: dict[str, jax.Array] = {}
    if all(isinstance(params[name]["w"], LayerOf) for name in names):
        whole = dict(zip(names, products(x_BTD, [params[name]["w"] for name in names])))
    out = []
    for name in names:
        with jax.named_scope(name):
            leaf = params[name]
            if whole:
                y = quantised.scaled(whole[name], leaf)
            else:
                y = (
                    stored.matmul(x_BTD, leaf["w"])
                    if stored.narrower(leaf["w"], x_BTD)
                    else quantised.matmul(x_BTD, leaf)
                )
            y = y.astype(x_BTD.dtype)
            if "b" in leaf:
                y = y + leaf["b"].astype(y.dtype)[None, None]
            out.append(y)
    if lora is None:
        return out
    return add_deltas(x_BTD, out, [lora.at(name) for name in names], [AXES[name] for name in names])
