"""Scores of mixed batches against torch in float64, adapters merged into its weights; also the
adapters other rollout tests use.

Axes: L layers, R rank, D in, F out, V vocab, T tokens.
"""

import numpy as np
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.rollout.score import Scorer
from tests import oracles

torch.set_num_threads(1)  # matrices this small lose by threads

CONFIGS = {  # ranks 1 and 8, targets that differ within a bucket, the embeddings too
    "one": AdapterConfig(1, 2.0, ("q", "v", "down")),
    "eight": AdapterConfig(8, 16.0),
    "tables": AdapterConfig(7, 7.0, ("k", "o", "embed", "unembed"), rslora=True),
}
MODULES = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"} | {
    x: f"self_attn.{x}_proj" for x in "qkvo"
}


def random_adapters(rng, cfg) -> dict:
    """Name -> (config, factors); both factors random and large enough to change most greedy
    tokens.
    """

    def draw(_, spec):
        return (rng.normal(size=spec.shape) * 0.7 * spec.shape[-1] ** -0.5).astype(np.float32)

    specs = transformer.abstract(cfg)
    return {
        name: (c, params_lib.map_with_path(draw, lora_tree.adapter_specs(specs, c)))
        for name, c in CONFIGS.items()
    }


def merged_models(directory, adapters) -> dict:
    """Name -> the checkpoint in float64 torch with ``W + scale * B^T A``; None -> the bare
    checkpoint.
    """
    models = {None: oracles.torch_model(directory, torch.float64)}
    for name, (config, factors) in adapters.items():
        models[name] = oracles.torch_model(directory, torch.float64)
        weights = models[name].state_dict()  # shares memory with the model
        flat = {
            path: torch.from_numpy(leaf).double()
            for path, leaf in params_lib.leaves_with_path(factors)
        }
        for path in sorted({p.rsplit("/", 1)[0] for p in flat}):
            a_LRD, b_LRF = flat[f"{path}/a"], flat[f"{path}/b"]
            delta_LFD = config.scale * b_LRF.transpose(1, 2) @ a_LRD
            if path == "embed":  # a lookup: the table is [in, out]
                weights["model.embed_tokens.weight"] += delta_LFD[0].T
            elif path == "unembed":
                weights["lm_head.weight"] += delta_LFD[0]
            else:
                for layer, delta_FD in enumerate(delta_LFD):
                    weights[f"model.layers.{layer}.{MODULES[path.split('/')[-1]]}.weight"] += (
                        delta_FD
                    )
    return models


def torch_logprobs(model, tokens) -> np.ndarray:
    """``log p(tokens[i + 1] | tokens[: i + 1])`` by torch's own log_softmax, ``[len - 1]``
    float64.
    """
    with torch.no_grad():
        logp_TV = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].double(), dim=-1)
    return logp_TV.gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


LENGTHS = (1, 2, 3, 5, 8, 13, 16, 16, 17, 21, 24, 24)
CHOICES = (
    "one",
    None,
    "eight",
    "tables",
    "one",
    None,
    "eight",
    None,
    "tables",
    "eight",
    None,
    "one",
)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_of_mixed_lengths_and_adapters_equal_torch(rng, tiny_base, hf_dirs, family):
    base = tiny_base(family)
    adapters = random_adapters(rng, base.cfg)
    models = merged_models(hf_dirs(family), adapters)
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(base.cfg), adapters)
    order = rng.permutation(len(LENGTHS))
    sequences = [rng.integers(0, base.cfg.vocab_size, LENGTHS[i]).tolist() for i in order]
    chosen = [CHOICES[i] for i in order]
    seen = []
    mine = Scorer(base, max_tokens=140).logprobs(  # 140: batches of 5 and 6 rows
        sequences, [slots.get(name) for name in chosen], stacks, seen.append
    )
    assert sorted(i for batch in seen for i in batch) == list(range(len(LENGTHS)))
    assert len(seen) > 1
    for tokens, name, values in zip(sequences, chosen, mine, strict=True):
        assert values.shape == (len(tokens) - 1,)
        assert values.dtype == np.float32
        wanted = torch_logprobs(models[name], tokens)
        # float32 through 3 layers; logits are of size 5
        np.testing.assert_allclose(values, wanted, atol=3e-5)
        if name is not None and len(tokens) > 2:
            assert np.abs(wanted - torch_logprobs(models[None], tokens)).max() > 1e-2, (
                "the adapter must matter"
            )


@pytest.mark.parametrize("adapter", [None, "eight"])
def test_scores_do_not_depend_on_the_mesh(rng, tiny_base, hf_dirs, adapter):
    """Three rows on a mesh that splits rows eight ways."""
    base = tiny_base("llama")
    spread = base_lib.load(str(hf_dirs("llama")), make_mesh({"data": 4, "fsdp": 2}))
    stacks, slots = lora_tree.stack_adapters(
        transformer.abstract(base.cfg), random_adapters(rng, base.cfg)
    )
    sequences = [rng.integers(0, base.cfg.vocab_size, n).tolist() for n in (7, 1, 16)]
    chosen = [slots.get(adapter), None, slots.get(adapter)]
    one, eight = (Scorer(b).logprobs(sequences, chosen, stacks) for b in (base, spread))
    for x, y in zip(one, eight, strict=True):
        # sums over split dimensions are ordered otherwise
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "sequence 1 has no tokens"),
        ([5] * 257, "257 tokens, more than the context of 256"),
        ([4, 97, 3], "token id 97; this base has ids 0 to 96"),
        ([4, -1, 3], "token id -1; this base has ids 0 to 96"),
    ],
)
def test_bad_sequences_are_refused_before_any_is_scored(tiny_base, tokens, message):
    seen = []
    with pytest.raises(UserError, match=message):
        Scorer(tiny_base()).logprobs([[1, 2], tokens], done=seen.append)
    assert not seen
