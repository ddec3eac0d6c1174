"""Choice of implementation for each op of ``pallas_kernels``. Imports no jax, so that ``launch``
checks a config quickly.
"""

import dataclasses

from mint_jax.errors import choice
from mint_jax.fields import setting

# Names in the ops' own tables; tests/models/kernels_test.py checks that they agree.
IMPLEMENTATIONS = {
    "packed_lora": ("pallas_tpu", "pallas_gpu", "xla"),
    "grouped_matmul": ("pallas_gpu", "xla"),
    "slot_lora": ("pallas_tpu", "pallas_gpu", "cpu", "xla"),
    "packed_attention": ("pallas_tpu", "pallas_gpu", "xla"),
    "paged_attention": ("pallas_tpu", "pallas_gpu", "cpu", "xla"),
    "latent_attention": ("pallas_tpu", "pallas_gpu", "xla"),
    "packed_matmul": ("pallas_tpu", "xla"),
    "layer_matmul": ("cpu", "pallas_gpu", "xla"),
    "draw": ("cpu", "xla"),
    "state_step": ("cpu", "xla"),
}


def _kernel(op: str, what: str) -> str:
    return setting(f"{what}: auto or one of {', '.join(IMPLEMENTATIONS[op])}", "auto")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Implementation of each op of ``pallas_kernels``. On CPUs Pallas kernels are interpreted."""

    packed_lora: str = _kernel("packed_lora", "adapters of experts")
    grouped_matmul: str = _kernel("grouped_matmul", "matrices of experts")
    slot_lora: str = _kernel(
        "slot_lora", "adapters of other projections in sampling, where each row names a slot"
    )
    packed_attention: str = _kernel(
        "packed_attention",
        "attention in training and scoring (xla for layers with an indexer)",
    )
    paged_attention: str = _kernel(
        "paged_attention", "grouped-query attention over the sampler's cache"
    )
    latent_attention: str = _kernel(
        "latent_attention",
        "multi-head latent attention over the sampler's cache (xla for models with an indexer)",
    )
    packed_matmul: str = _kernel(
        "packed_matmul",
        "matrices and adapters of experts in one forward pass (xla is two passes, as is auto where "
        "packed_lora or grouped_matmul is named)",
    )
    layer_matmul: str = _kernel(
        "layer_matmul", "frozen projections of the sampler's layers, and few rows' unembedding"
    )
    draw: str = _kernel("draw", "choice of the next token")
    state_step: str = _kernel("state_step", "a decoded token of layers with a state")

    def __post_init__(self) -> None:
        for op, names in IMPLEMENTATIONS.items():
            if getattr(self, op) not in ("auto", *names):
                raise choice(op, getattr(self, op), ("auto", *names))
