"""Scores of mixed batches against torch in float64, adapters merged into its weights; also the
adapters other rollout tests use.

Axes: L layers, R rank, D in, F out, V vocab, T tokens.
"""

import re

import numpy as np
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import hf, transformer
from mint_jax.rollout.score import Scorer
from tests import oracles
from tests.adapters import random_adapter

torch.set_num_threads(1)  # matrices this small lose by threads

CONFIGS = {  # ranks 1 and 8, targets that differ within a bucket, the embeddings too
    "one": AdapterConfig(1, 2.0, ("q", "v", "down")),
    "eight": AdapterConfig(8, 16.0),
    "tables": AdapterConfig(7, 7.0, ("k", "o", "embed", "unembed"), rslora=True),
}


def random_adapters(rng, cfg, configs=CONFIGS, size=0.7) -> dict:
    """Name -> (config, factors); both factors random and large enough to change most greedy
    tokens.
    """
    specs = transformer.abstract(cfg)
    return {name: (c, random_adapter(rng, specs, c, size)) for name, c in configs.items()}


def stacked_adapters(rng, cfg, configs=CONFIGS, size=0.7) -> tuple:
    """Random adapters, their stacks, and their slots by name."""
    adapters = random_adapters(rng, cfg, configs, size)
    return adapters, *lora_tree.stack_adapters(transformer.abstract(cfg), adapters)


def dtype_of(cfg):
    """float64, except with experts: torch's product of those has no such form."""
    return torch.float64 if cfg.experts is None else torch.float32


def merged(directory, cfg, config, factors):
    """The checkpoint in torch with ``W + scale * B^T A``, routed experts in transformers' stacked
    parameters too.
    """
    model = oracles.torch_model(directory, dtype_of(cfg))
    weights = model.state_dict()  # shares memory with the model
    flat = dict(params_lib.leaves_with_path(lora_tree.expanded(factors)))
    changed = 0
    for path, names in hf.module_names(cfg, sorted({p.rsplit("/", 1)[0] for p in flat})).items():
        a, b = (torch.tensor(flat[f"{path}/{f}"]).to(dtype_of(cfg)).flatten(0, -3) for f in "ab")
        for name, a_RD, b_RF in zip(names, a, b, strict=True):
            delta_FD = config.scale * b_RF.T @ a_RD
            if f"{name}.weight" in weights:  # a lookup's table is [in, out]
                weights[f"{name}.weight"] += delta_FD.T if path == "embed" else delta_FD
            else:
                experts, e, kind = re.fullmatch(
                    r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", name
                ).groups()
                fused = "gate_up" if cfg.gated and kind != "down" else kind
                whole = weights[f"{experts}.{fused}_proj"][int(e)]
                F = len(delta_FD)
                if fused == kind != "down":
                    whole += delta_FD
                elif cfg.experts.bias:  # gpt-oss: transposed, rows of gate and up alternate
                    of = slice(None) if kind == "down" else slice(kind == "up", None, 2)
                    whole.T[of] += delta_FD
                else:
                    (whole[F:] if kind == "up" else whole[:F]).add_(delta_FD)  # gate's rows first
            changed += 1
    assert changed == sum(np.prod(x.shape[:-2]) for p, x in flat.items() if p.endswith("/a"))
    return model


def merged_models(directory, cfg, adapters) -> dict:
    """Name -> the checkpoint in torch with its adapter merged; None -> the bare checkpoint."""
    models = {name: merged(directory, cfg, *adapter) for name, adapter in adapters.items()}
    return models | {None: oracles.torch_model(directory, dtype_of(cfg))}


def torch_logprobs(model, tokens) -> np.ndarray:
    """``log p(tokens[i + 1] | tokens[: i + 1])`` by torch's own log_softmax, ``[len - 1]``
    float64.
    """
    with torch.no_grad():
        logp_TV = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].double(), dim=-1)
    return logp_TV.gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


LENGTHS = (1, 2, 3, 5, 8, 13, 16, 16, 17, 21, 24, 24)
CHOICES = ("one", None, "eight", "tables") * 3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_of_mixed_lengths_and_adapters_equal_torch(rng, tiny_base, hf_dirs, family):
    base = tiny_base(family)
    adapters, stacks, slots = stacked_adapters(rng, base.cfg)
    models = merged_models(hf_dirs(family), base.cfg, adapters)
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
        moved = np.abs(wanted - torch_logprobs(models[None], tokens)).max(initial=0)
        assert name is None or len(tokens) < 3 or moved > 1e-2, "the adapter must matter"


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
