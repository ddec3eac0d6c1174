"""Counts the operations of a training step from the dimensions, as a lower bound.

A multiply-add is two operations. The base is frozen: its backward pass multiplies for activations
but not for weights, so forward and backward cost 2 + 2 operations per weight and token.
"""

import math

from mint_jax import params as params_lib
from mint_jax.lora.tree import AdapterConfig, projections
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig


def active_share(path: str, cfg: ModelConfig) -> float:
    """The share of a projection's weights that one token meets: of routed experts, those it
    visits.
    """
    return cfg.experts.per_token / cfg.experts.count if cfg.experts and "/experts/" in path else 1.0


def projection_params(cfg: ModelConfig) -> int:
    """Weights of all layers that multiply a token; embedding and unembedding are not among them."""
    specs = dict(params_lib.leaves_with_path(transformer.abstract(cfg)))
    layers = {
        path: spec
        for path, spec in specs.items()
        if path.endswith("/w") and path.split("/")[0] in cfg.stacks
    }
    return round(sum(spec.size * active_share(path, cfg) for path, spec in layers.items()))


def train_step_flops(
    cfg: ModelConfig, tokens: int, targets: int, pairs: int, adapter: AdapterConfig
) -> dict[str, int]:
    """Operations of one forward and backward.

    Args:
        tokens: that run through the layers.
        targets: positions that reach the unembedding; their logits and the gradient at the last
            hidden state.
        pairs: (query, key) pairs of the causal attention, all rows.
        adapter: the same for all policies; each factor has a product forward, one for its input and
            one for itself.
    """
    adapted = projections(transformer.abstract(cfg), adapter.targets)
    lora = sum(
        math.prod(p.stack) * adapter.rank * (p.d_in + p.d_out) * active_share(f"{path}/", cfg)
        for path, p in adapted.items()
    )
    return {
        "base": 4 * projection_params(cfg) * tokens,
        "unembed": 4 * cfg.vocab_size * cfg.d_model * targets,
        "attention": 6 * 2 * cfg.num_layers * cfg.num_heads * cfg.head_dim * pairs,
        "adapters": round(6 * lora * tokens),
    }


def train_step_bytes(cfg: ModelConfig, itemsize: int, tokens: int) -> int:
    """Bytes that must move at least: the base read twice, and a layer's inputs written and read
    once.
    """
    weights = projection_params(cfg) + cfg.vocab_size * cfg.d_model
    return itemsize * (2 * weights + 2 * cfg.num_layers * tokens * cfg.d_model)
