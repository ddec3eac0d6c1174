"""A layer of routed experts, with shared experts that every token visits.

Axes: B rows, T tokens, D model width, E experts, X experts of a token.
"""

from typing import Any

import jax

from mint_jax.lora.view import AdapterView
from mint_jax.models import experts, mlp, router
from mint_jax.models.config import ModelConfig
from mint_jax.models.expert_parallel import routed
from mint_jax.params import ParamSpec


def specs(cfg: ModelConfig, L: int, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of ``L`` stacked layers."""
    e, D = cfg.experts, cfg.d_model
    assert e is not None
    out = {
        "norm": ParamSpec((L, D), ("layers", "norm"), dtype, "ones"),
        "router": router.specs(L, D, e, dtype),
        "experts": experts.specs(L, e.count, D, e.width, dtype),
    }
    if e.shared:
        out["shared"] = mlp.projections(L, D, e.shared * e.width, dtype)
    return out


def moe(
    h_BTD: jax.Array,
    p: Any,
    lora: AdapterView | None,
    cfg: ModelConfig,
    replay: jax.Array | None = None,
) -> tuple[jax.Array, router.Route]:
    """Returns the layer's output ``[B, T, D]`` and the route taken; ``replay [B, T, X]`` as in
    ``route``.
    """
    assert cfg.experts is not None
    route = router.route(h_BTD, p, lora, cfg.experts, replay)
    with jax.named_scope("experts"):
        adapters = None if lora is None else lora.at("experts")
        out = routed(h_BTD, route.ids, route.weights, p["experts"], adapters, cfg.kernels)
    if cfg.experts.shared:
        with jax.named_scope("shared"):
            out = out + mlp.mlp(h_BTD, p["shared"], None if lora is None else lora.at("shared"))
    return out.astype(h_BTD.dtype), route
