"""The names of implementations in configs are those of the ops' own tables."""

from mint_jax.models.kernels import IMPLEMENTATIONS
from pallas_kernels import (
    draw,
    grouped_matmul,
    latent_attention,
    layer_matmul,
    packed_lora,
    packed_matmul,
    paged_attention,
    state_step,
)

TABLES = {
    "packed_lora": packed_lora.ADD,
    "grouped_matmul": grouped_matmul.GROUPED,
    "packed_matmul": packed_matmul.MATMUL,
    "paged_attention": paged_attention.ATTEND,
    "latent_attention": latent_attention.ATTEND,
    "layer_matmul": layer_matmul.MATMUL,
    "draw": draw.DRAW,
    "state_step": state_step.STEP,
}


def test_names_of_implementations_are_those_of_the_tables():
    for op, table in TABLES.items():
        assert IMPLEMENTATIONS[op] == tuple(one.name for one in table), op
    # they choose without a table
    assert IMPLEMENTATIONS.keys() - TABLES.keys() == {"slot_lora", "packed_attention"}
