"""The gated MLP of a decoder layer (Shazeer 2020, arXiv 2002.05202).

Axes: B rows, T tokens, D model width, F ffw width, L layers.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from mint_jax.lora.view import AdapterView
from mint_jax.models.linear import matrix, project, project_each
from mint_jax.params import ParamSpec


def specs(L: int, D: int, F: int, dtype: Any, bias: bool = False) -> dict[str, Any]:
    """Returns the parameters of ``L`` stacked MLPs of width ``F``, with the norm before them."""
    return {"norm": ParamSpec((L, D), ("layers", "norm"), dtype, "ones")} | projections(
        L, D, F, dtype, bias
    )


def projections(L: int, D: int, F: int, dtype: Any, bias: bool = False) -> dict[str, Any]:
    """Returns the three matrices only."""
    return {
        "gate": matrix("gate", L, D, F, dtype, bias),
        "up": matrix("up", L, D, F, dtype, bias),
        "down": matrix("down", L, F, D, dtype, bias),
    }


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns ``silu(gate) * up``; the backward pass stores only the two arguments."""
    return jax.nn.silu(gate) * up


def _swiglu_backward(residuals, g):
    gate, up = residuals
    sigma = jax.nn.sigmoid(gate)
    return g * up * sigma * (1 + gate * (1 - sigma)), g * gate * sigma


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


def mlp(h_BTD: jax.Array, p: Any, lora: AdapterView | None) -> jax.Array:
    """Computes the gated MLP, ``down(silu(gate h) * up h)``."""
    gate, up = project_each(h_BTD, p, lora, ("gate", "up"))
    gate, up = checkpoint_name(gate, "mlp_gate"), checkpoint_name(up, "mlp_up")
    return project(swiglu(gate, up), p, lora, "down")
