"""Which implementation each op of ``pallas_kernels`` has. Imports no jax, so that ``launch`` checks
a config at once.
"""

import dataclasses

from mint_jax.errors import choice

# the names in the ops' own tables; tests/models/kernels_test.py holds the two equal
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
    """Which implementation each op of ``pallas_kernels`` has: auto, or one that is named. Those of
    Pallas run in an interpreter on a CPU.

    Attributes:
        packed_lora: adapters of experts: auto, xla, pallas_tpu or pallas_gpu.
        grouped_matmul: experts' own matrices: auto, xla or pallas_gpu.
        slot_lora: adapters of other projections where rows name slots, in sampling: auto, xla,
            pallas_tpu, pallas_gpu or cpu.
        packed_attention: attention in training and scoring: auto, xla, pallas_tpu or pallas_gpu;
            where an indexer chooses keys it is xla.
        paged_attention: grouped-query attention to the cache of samplers: auto, xla, pallas_tpu,
            pallas_gpu or cpu.
        latent_attention: the same of multi-head latent attention; where an indexer chooses keys it
            is xla.
        packed_matmul: experts' matrices and adapters in one pass, forward: auto, xla (one after the
            other) or pallas_tpu. It is xla where one of packed_lora and grouped_matmul is not auto,
            unless it is named itself.
        layer_matmul: the frozen projections of a sampler's layers, and of few rows the unembedding:
            auto, xla, pallas_gpu or cpu.
        draw: a sampler's choice of the next token: auto, xla or cpu.
    """

    packed_lora: str = "auto"
    grouped_matmul: str = "auto"
    slot_lora: str = "auto"
    packed_attention: str = "auto"
    paged_attention: str = "auto"
    latent_attention: str = "auto"
    packed_matmul: str = "auto"
    layer_matmul: str = "auto"
    draw: str = "auto"

    def __post_init__(self) -> None:
        for op, names in IMPLEMENTATIONS.items():
            if getattr(self, op) not in ("auto", *names):
                raise choice(f"kernels.{op}", getattr(self, op), ("auto", *names))
