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
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Implementation of each op of ``pallas_kernels``. On CPUs Pallas kernels are interpreted."""

    packed_lora: str = setting("adapters of experts: auto, xla, pallas_tpu or pallas_gpu", "auto")
    grouped_matmul: str = setting("matrices of experts: auto, xla or pallas_gpu", "auto")
    slot_lora: str = setting(
        "adapters of other projections in sampling, where each row names a slot: auto, xla, "
        "pallas_tpu, pallas_gpu or cpu",
        "auto",
    )
    packed_attention: str = setting(
        "attention in training and scoring: auto, xla, pallas_tpu or pallas_gpu; models with an "
        "indexer use xla",
        "auto",
    )
    paged_attention: str = setting(
        "grouped-query attention over the sampler's cache: auto, xla, pallas_tpu, pallas_gpu or "
        "cpu",
        "auto",
    )
    latent_attention: str = setting(
        "multi-head latent attention over the sampler's cache: auto, xla, pallas_tpu or "
        "pallas_gpu; models with an indexer use xla",
        "auto",
    )
    packed_matmul: str = setting(
        "matrices and adapters of experts in one forward pass: auto, xla (two passes) or "
        "pallas_tpu; auto means xla where packed_lora or grouped_matmul is named",
        "auto",
    )
    layer_matmul: str = setting(
        "frozen projections of the sampler's layers, and the unembedding of few rows: auto, xla, "
        "pallas_gpu or cpu",
        "auto",
    )
    draw: str = setting("choice of the next token: auto, xla or cpu", "auto")

    def __post_init__(self) -> None:
        for op, names in IMPLEMENTATIONS.items():
            if getattr(self, op) not in ("auto", *names):
                raise choice(f"kernels.{op}", getattr(self, op), ("auto", *names))
