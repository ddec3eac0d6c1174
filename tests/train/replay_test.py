"""Router replay (R3): the trainer takes the experts that the sampler took, and says how far its own
router strays from them.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.config import Delta, Experts, ModelConfig
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.batch import Group, TrainSequence, data_of
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer

CFG = ModelConfig(
    family="qwen3_moe",
    vocab_size=61,
    d_model=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    dense_layers=1,
    # the sigmoid router's bias moves the choice and nothing else: replay can undo it exactly
    experts=Experts(count=8, per_token=2, width=24, scores="sigmoid", scale=1.5),
)
# Experts in three stacks, whose layers are not in the stacks' order.
HYBRID = CFG.replace(
    num_layers=6, delta=Delta(2, 4, 8, 6, 4, full=(True, False, True, False, True, True))
)
# Layers with an MLP and experts.
WITH_MLP = CFG.replace(experts=dataclasses.replace(CFG.experts, with_mlp=True))
POLICY = PolicyConfig("p", AdapterConfig(4), loss=LossConfig("reinforce"))


@pytest.fixture(params=[CFG])
def base(request, rng, tmp_path, mesh):
    cfg, key = request.param, jax.random.key(int(rng.integers(1 << 30)))
    params = params_lib.init(transformer.abstract(cfg), key)
    return Base("random", tmp_path, cfg, params, mesh, None, "0" * 64)


def perturbed(base, rng):
    """The same base, whose router prefers other experts."""

    def other(path, x):
        is_bias = path.endswith("/choice_bias")
        return jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32) if is_bias else x

    return dataclasses.replace(base, params=params_lib.map_with_path(other, base.params))


def rollout(base, rng, n=3):
    """Two prompts' samples with their routes, as groups to train on; the second prompt is shorter
    and pads the batch.
    """
    prompts = [tuple(int(t) for t in rng.integers(1, CFG.vocab_size, length)) for length in (9, 5)]
    requests = [
        Request(prompt, n=n, max_tokens=8, seed=int(rng.integers(1 << 30))) for prompt in prompts
    ]
    groups = []
    for request, completions in zip(requests, Engine(base, keep_routes=True).generate(requests)):
        sequences = []
        for c in completions:
            n, advantage = len(c.tokens), float(rng.normal())
            columns = [1.0] * n, [advantage] * n, c.logprobs
            sequences.append(TrainSequence(c.tokens, *columns, routes=c.routes))
        groups.append(Group(list(request.prompt), sequences, routes=completions[0].prompt_routes))
    return groups


def update(base, groups, replay=True):
    groups = copy.deepcopy(groups)  # an update notes its log-probabilities in those it is given
    for part in () if replay else (x for g in groups for x in (g, *g.sequences)):
        part.routes = None
    return Trainer(base, [POLICY]).update({"p": groups})["p"]


@pytest.mark.long
@pytest.mark.parametrize(
    "base", [CFG, HYBRID, WITH_MLP], indirect=True, ids=["one_stack", "three_stacks", "with_mlp"]
)
def test_a_perturbed_router_changes_the_loss_without_replay_and_not_with_it(base, rng):
    groups = rollout(base, rng)
    same = update(base, groups, replay=False)
    assert same["max_gap"] < 1e-4
    other = perturbed(base, rng)
    moved, held = update(other, groups, replay=False), update(other, groups)
    assert moved["max_gap"] > 1e-2, "the perturbation does nothing, so the test says nothing"
    assert abs(moved["loss"] - same["loss"]) > 1e-4
    # float32, another order of summation: the rows of an expert are sorted differently only in
    # shape
    assert held["max_gap"] < 1e-4
    assert held["loss"] == pytest.approx(same["loss"], abs=1e-5)
    assert held["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4)


def test_tokens_without_routes_are_masked(base, rng):
    groups = rollout(base, rng)
    lost = groups[0].sequences[0]
    lost.routes = np.where(
        np.arange(len(lost.tokens))[:, None, None] < 3, -1, lost.routes.astype(np.int16)
    )
    groups[1].sequences[1].routes = None
    count = 3 + len(groups[1].sequences[1].tokens)
    targets = sum(len(s.tokens) for group in groups for s in group.sequences)
    assert sum(len(datum.targets) for datum in data_of(groups)) == targets - count
    row = update(base, groups)
    assert row["unrouted"] == count
    assert row["tokens"] == sum(len(s.tokens) for g in groups for s in g.sequences) - count


# the latter's config has experts, and none of its layers
@pytest.mark.parametrize("family", ["llama", "deepseek_v3_dense"])
def test_routes_of_a_base_without_experts_are_refused(tiny_base, family):
    with pytest.raises(UserError, match="has no experts"):
        Engine(tiny_base(family), keep_routes=True)
