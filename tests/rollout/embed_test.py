"""Vectors of prompts against the hidden states of transformers; padding changes nothing."""

import numpy as np
import pytest
import torch
from transformers import AutoModel

from mint_jax.models import base as base_lib
from mint_jax.rollout.embed import Embedder

# dense, windows, experts, latent attention, layers with a state
FAMILIES = ("llama", "gemma3", "qwen3_moe", "moonlight", "qwen3_5")


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(hf_dirs, tiny_base, rng, family):
    base = tiny_base(family)
    lengths = (1, 5, 16, 17, 40)
    prompts = [rng.integers(3, base.cfg.vocab_size, n).tolist() for n in lengths]
    found = Embedder(base)(prompts)
    assert found.shape == (5, base.cfg.d_model)
    model = AutoModel.from_pretrained(hf_dirs(family), dtype=torch.float32).eval()
    model = getattr(model, "language_model", model)
    for vector, prompt in zip(found, prompts):
        with torch.no_grad():
            h = model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
        # float32 through the layers
        np.testing.assert_allclose(vector, h[-1] / np.linalg.norm(h[-1]), atol=2e-5)


def test_a_sharded_base_gives_the_same_vectors(mesh, mesh8, rng):
    prompts = [rng.integers(3, 300, n).tolist() for n in (3, 20)]
    one, eight = (Embedder(base_lib.load("tiny-random", m))(prompts) for m in (mesh, mesh8))
    np.testing.assert_allclose(eight, one, atol=2e-5)  # sums in another order


def test_of_a_long_prompt_the_last_tokens_count(tiny_base, rng, monkeypatch):
    from mint_jax.rollout import embed

    monkeypatch.setattr(embed, "TOKENS", (8, 32))
    embedder = Embedder(tiny_base())
    prompt = rng.integers(3, 90, 100).tolist()
    np.testing.assert_array_equal(embedder([prompt]), embedder([prompt[-32:]]))


def test_all_programs_are_known_before(tiny_base, rng):
    from mint_jax.compiling import compilations

    embedder = Embedder(tiny_base())
    for program in embedder.programs():
        program.build()
    with compilations() as names:
        embedder([rng.integers(3, 90, n).tolist() for n in (3, 30, 200)])
    assert names == []
