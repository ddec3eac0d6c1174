"""The same batch gives the same bits on a GPU: there a scatter adds what it is given in whatever
order its threads come.
"""

import re

import jax
import pytest

from mint_jax.lora.tree import ALL_LINEAR, AdapterConfig
from mint_jax.models import transformer
from mint_jax.train import state as state_lib
from mint_jax.train import step
from tests.laws import vmap_one_matmul_test as shapes
from tests.pallas_kernels import gpu

EVERYWHERE = (ALL_LINEAR, "embed", "unembed")
SCATTER = re.compile(
    r'"stablehlo\.scatter"\(.*?\}\) : \((?:tensor<[^>]*>, )*tensor<[^>]*>\) -> tensor<([^>]*)>',
    re.S,
)


def added(text: str) -> list[str]:
    """Shapes of floats that a scatter adds to."""
    found = [(one.group(0), one.group(1)) for one in SCATTER.finditer(text)]
    assert len(found) == text.count('"stablehlo.scatter"')
    return [
        shape for body, shape in found if "stablehlo.add" in body and re.search("f32|bf16", shape)
    ]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_a_training_step_adds_no_two_numbers_by_a_scatter(family, tiny_base):
    """All that are left set one number in zeros, and add zeros to it: a place's target, the token
    that is one, and a token's experts.
    """
    cfg = tiny_base(family).cfg
    params, _, batch, coefs, slots = shapes.training_args(cfg)
    wanted = [AdapterConfig(r, targets=EVERYWHERE) for r in shapes.RANKS]
    state = jax.eval_shape(lambda: state_lib.empty(transformer.abstract(cfg), wanted))
    text = gpu.text(
        lambda *args: step.forward_backward(*args, cfg=cfg), params, state, batch, coefs, slots
    )
    P, B, T = batch.tokens.shape
    single = {f"{P * B}x{T}x{cfg.d_model}xf32", f"{batch.index.size}x{cfg.vocab_size}xf32"}
    if cfg.experts is not None:
        single.add(f"{P * B}x{T}x{cfg.experts.count}xf32")
    assert set(added(text)) == single
