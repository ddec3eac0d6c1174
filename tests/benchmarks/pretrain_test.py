"""The tiny sparse base is a checkpoint that has learned."""

import pytest

from benchmarks import launch
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.models import base as base_lib


@pytest.mark.long
def test_a_pretrained_base_is_a_checkpoint_that_learned(tmp_path, mesh):
    made = launch.run(launch.load("configs/bench/pretrain.py"), tmp_path)
    assert made["loss_after"] < 0.5 * made["loss_before"]
    base = base_lib.load(made["base"], mesh)
    assert base.cfg.stacks == {"dense": 1, "moe": 2}
    assert base.cfg.latent is not None
    text = "2 or 9: 9\n~ {x}"
    tokenizer = Tokenizer(made["base"])
    assert tokenizer.decode(tokenizer.encode(text)) == text
