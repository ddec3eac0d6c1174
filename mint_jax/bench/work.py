"""Operations of a training step, counted from the dimensions: what the device must do at least.

A multiply-add is two operations. The base is frozen: its backward pass has the product for the activations and none for the
weights, so forward and backward cost 2 + 2 operations a weight and token.
"""

from mint_jax import params as params_lib
from mint_jax.lora.tree import AdapterConfig, factor_shapes
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig


def projection_params(cfg: ModelConfig) -> int:
    """Weights of all layers that multiply every token; embedding and unembedding are not among them."""
    specs = dict(params_lib.leaves_with_path(transformer.abstract(cfg)))
    return sum(spec.size for path, spec in specs.items() if path.endswith("/w") and path.split("/")[0] in cfg.stacks)


def train_step_flops(cfg: ModelConfig, tokens: int, targets: int, pairs: int, adapter: AdapterConfig) -> dict[str, int]:
    """Operations of one forward and backward.

    Args:
        tokens: that run through the layers.
        targets: positions that reach the unembedding; their logits and the gradient at the last hidden state.
        pairs: (query, key) pairs of the causal attention, all rows.
        adapter: the same for all policies; each factor has a product forward, one for its input and one for itself.
    """
    lora = sum(L * adapter.rank * (D + F) for L, D, F in factor_shapes(transformer.abstract(cfg), adapter.targets).values())
    return {
        "base": 4 * projection_params(cfg) * tokens,
        "unembed": 4 * cfg.vocab_size * cfg.d_model * targets,
        "attention": 6 * 2 * cfg.num_layers * cfg.num_heads * cfg.head_dim * pairs,
        "adapters": 6 * lora * tokens,
    }


def train_step_bytes(cfg: ModelConfig, itemsize: int, tokens: int) -> int:
    """Bytes that must move at least: the base read twice, and a layer's inputs written and read once."""
    weights = projection_params(cfg) + cfg.vocab_size * cfg.d_model
    return itemsize * (2 * weights + 2 * cfg.num_layers * tokens * cfg.d_model)
