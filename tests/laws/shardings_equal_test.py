"""A mesh changes where things are computed, never what: training and sampling on eight devices
equal those on one.
"""

import dataclasses
import json
import os

import chex
import jax
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import make_mesh, single_device_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import hf, transformer
from mint_jax.models.hf_config import from_hf
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.score import Scorer
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.exchange import looser
from tests.groups import random_groups

DENSE = {  # every dimension that a mesh below splits is divisible by its ways
    "architectures": ["Qwen3ForCausalLM"],
    **{"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "max_position_embeddings": 128,
}
CHOSEN = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
ROUTED = {"num_experts": 8} | CHOSEN
SPARSE = DENSE | ROUTED | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
LATENT = DENSE | CHOSEN
LATENT |= {
    "architectures": ["DeepseekV3ForCausalLM"],
    **{"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 20},
    **{"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    "head_dim": 8,  # of the rotary part
}
INDEXED = LATENT | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    **{"index_n_heads": 4, "index_head_dim": 12, "index_topk": 5},
    "indexer_types": ["full", "shared"],
}
STATES = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_hidden_layers": 5},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "rms_norm_eps": 1e-2,  # see ``oracles.TINY``
}
WINDOWS = DENSE | {  # sinks and biases, too
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
}
# Heads of both kinds of layers divide over two devices, and pages are split by heads.
SHARED_KEYS = DENSE | {
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 5,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": DENSE["vocab_size"],
    "final_logit_softcapping": 9.0,
}
WITH_MLP = {name: value for name, value in SHARED_KEYS.items() if "layer_input" not in name} | {
    **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": True},
    **{"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
}
HYBRID = STATES | ROUTED | {"architectures": ["Qwen3NextForCausalLM"]}
HYBRID |= {"num_hidden_layers": 4, "shared_expert_intermediate_size": 20}
CHANNELS = {name: value for name, value in LATENT.items() if "dense" not in name} | {
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 5,
    "linear_attn_config": {"head_dim": 12, "num_heads": 4, "full_attn_layers": [3, 5]},
    "mla_use_nope": True,
    "rms_norm_eps": 1e-2,
}
ONLY = {k: v for k, v in DENSE.items() if k != "num_hidden_layers"} | {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "MEM*-E",
    **{"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2},
    **{"n_routed_experts": 8, "moe_shared_expert_intermediate_size": 20, **CHOSEN},
}
FAMILIES = {
    **{"dense": DENSE, "experts": SPARSE, "latent": LATENT, "indexed": INDEXED},
    **{"states": STATES, "hybrid": HYBRID, "only": ONLY, "channels": CHANNELS},
    **{"windows": WINDOWS, "shared keys": SHARED_KEYS, "with mlp": WITH_MLP},
}
MESHES = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "tensor2_fsdp2_data2": {"tensor": 2, "fsdp": 2, "data": 2},
    "expert4_tensor2": {"expert": 4, "tensor": 2},
}
# into how many parts a dense projection falls
SPLITS = {"data8": 1, "fsdp8": 8, "tensor2_fsdp2_data2": 4, "expert4_tensor2": 2}
MESHES_OF = {
    "data8": ("dense", "states"),
    "fsdp8": ("dense",),
    "tensor2_fsdp2_data2": ("dense", "states", "only", "channels", "shared keys"),
    # all that the last two have, others have too
    "expert4_tensor2": (
        *("experts", "indexed", "windows", "only", "hybrid", "latent", "with mlp"),
    ),
}
SLOW = ("latent", "with mlp")
CASES = [
    pytest.param(family, name, marks=pytest.mark.slow if family in SLOW else pytest.mark.long)
    for family in FAMILIES  # one after another: their problem is made once
    for name, families in MESHES_OF.items()
    if family in families
]


def adapters_of(family):
    targets = ("q", "o", "down") if family == "dense" else ("all-linear",)  # split both ways
    form = "shared_outer" if family in ("experts", "hybrid", "with mlp") else "each"
    shared = AdapterConfig(1, targets=targets, experts=form)
    own = {"a": AdapterConfig(3, targets=targets), "c": shared}
    if family == "dense":
        own["d"] = AdapterConfig(kind="bias", targets=targets)
        own["e"] = AdapterConfig(3, targets=targets, kind="basis")
    return own


def seed_of(family):
    """Sparse families choose experts and keys: of two that are nearly equal another sum may take
    the other, so their seed is fixed.
    """
    return int(os.environ["MINT_TEST_SEED"]) if family == "dense" else 7


def save_checkpoint(family, directory):
    cfg = from_hf(FAMILIES[family])
    specs, key = transformer.abstract(cfg), jax.random.key(seed_of(family))
    if family == "windows":  # biases and sinks that are not zero
        filled = {"zeros": "normal"}
        specs = jax.tree.map(
            lambda s: dataclasses.replace(s, init=filled.get(s.init, s.init)), specs
        )
    params = params_lib.init(specs, key)
    hf.save(params, cfg, directory)
    (directory / "config.json").write_text(json.dumps(FAMILIES[family]))
    return str(directory)


def outcome(base, configs, adapters, groups, requests):
    """What one update of every policy, scoring and greedy sampling give on this base's mesh."""
    # eps 1 makes the update nearly proportional to the gradient; the usual 1e-8 would blow up the
    # rounding of gradients near 0
    optimizer = OptimizerConfig(learning_rate=0.1, eps=1.0, weight_decay=0.1)
    drops = "all-linear" not in configs["a"].targets  # the targets of a base without experts
    how = optimizer, LossConfig("ppo", kl_kind="k3", kl=0.1)
    rates = {"a": 0.3 * drops}
    policies = [PolicyConfig(n, c, *how, dropout=rates.get(n, 0)) for n, c in configs.items()]
    trainer = Trainer(base, policies)
    for name, adapter in adapters.items():
        trainer.load_adapter(name, adapter)
    out = {"train": trainer.forward_backward(groups)}
    out["gradients"] = {
        b: jax.tree.map(np.array, stack.grad_sum) for b, stack in trainer.state.items()
    }
    out["update"] = trainer.optim_step(list(configs))
    out["adapters"] = {name: trainer.adapter(name) for name in configs}
    requests = [
        Request(prompt, trainer.slots.get(name), n=2, max_tokens=9, temperature=0.0)
        for name, prompt in requests
    ]
    completions = [c for cs in Engine(base).generate(requests, trainer.stacks) for c in cs]
    out["tokens"] = [c.tokens for c in completions]
    out["sampled"] = [c.logprobs for c in completions]
    texts, owners = [r.prompt for r in requests], [r.adapter for r in requests]
    out["scores"] = [x.tolist() for x in Scorer(base).logprobs(texts, owners, trainer.stacks)]
    return out


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """``problem(family)`` -> a checkpoint, adapters, groups and prompts, and what one device makes
    of them.
    """
    made = {}

    def get(family):
        if family not in made:
            made.clear()
            checkpoint = save_checkpoint(family, tmp_path_factory.mktemp(family))
            made[family] = (checkpoint, *pose(family, checkpoint))
        return made[family]

    return get


def pose(family, checkpoint):
    rng = np.random.default_rng(seed_of(family))
    base, configs = base_lib.load(checkpoint, single_device_mesh()), adapters_of(family)

    def ids(n):
        return rng.integers(3, DENSE["vocab_size"], n).tolist()

    specs = transformer.abstract(base.cfg)
    draw = lambda s: (0.1 * rng.normal(size=s.shape)).astype(np.float32)  # noqa: E731
    adapters = {
        n: jax.tree.map(draw, lora_tree.adapter_specs(specs, c)) for n, c in configs.items()
    }
    groups = {n: random_groups(rng, DENSE["vocab_size"]) for n in configs}
    owners = ("a", "a", "c", None, *(name for name in "de" if name in configs))
    requests = [(n, tuple(ids(k))) for n, k in zip(owners, (5, 7, 3, 6, 4, 8))]
    args = configs, adapters, groups, requests
    return args, outcome(base, *args)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_eight_devices_equal_one(family, name, problem):
    checkpoint, args, one = problem(family)
    base = base_lib.load(checkpoint, make_mesh(MESHES[name]))
    of_experts = SPLITS[name] * MESHES[name].get("expert", 1)
    for path, parts in (("dense/mlp/up/w", SPLITS[name]), ("moe/moe/experts/up/w", of_experts)):
        projection = dict(params_lib.leaves_with_path(base.params)).get(path)
        if projection is not None:
            assert len(projection.sharding.device_set) == 8
            assert projection.size == parts * projection.addressable_shards[0].data.size
    many = outcome(base, *args)
    # greedy; two logits within 1e-6 of each other are not expected in 72 tokens
    assert many["tokens"] == one["tokens"]
    # float32: parts summed on several devices are added in another order, units of the last place
    # of terms up to about 10
    factor = looser(base.cfg)
    for key in ("sampled", "scores", "train", "update"):
        chex.assert_trees_all_close(many[key], one[key], rtol=factor * 1e-4, atol=factor * 2e-5)
    # Parts of the largest gradient: a unit in the last place of every weight moves the indexed
    # family's by 4e-6; the dense family's differ by 2e-6 in the median of 40 seeds, 1.2e-5 in the
    # worst of them and 3.2e-5 in another run, where terms cancel.
    rounding = factor * 1e-4 * max(np.abs(x).max() for x in jax.tree.leaves(one["gradients"]))
    chex.assert_trees_all_close(many["gradients"], one["gradients"], rtol=0, atol=rounding)
    # with eps 1 an update moves by at most the learning rate times the difference of two gradients;
    # then units of the last place
    chex.assert_trees_all_close(
        many["adapters"], one["adapters"], rtol=1e-5, atol=0.1 * rounding + 1e-6
    )
