"""Law 3: whatever one policy does, all others stay bit-identical; a policy whose gradient is not
finite skips its own update.

On every family of bases, in the form of the CPU and in that of accelerators (on the CPU, chosen by
hand), and over a mesh; in training and in sampling.
"""

import copy
import dataclasses

import chex
import jax
import numpy as np
import pytest

from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import ALL_LINEAR, AdapterConfig
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import expert_parallel, transformer
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.score import Scorer
from mint_jax.train import state as state_lib
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests import oracles
from tests.adapters import biased_targets
from tests.groups import random_groups
from tests.laws.shardings_equal_test import MESHES, save_checkpoint

pytestmark = pytest.mark.bits

RANKS = {"c": 1, "a": 3, "b": 3}  # a and b are neighbours in one stack
USUAL = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
DIMUON = OptimizerConfig(learning_rate=3e-3, eps=1e-4, kind="dimuon")
DROPOUT = {"a": 0.4, "c": 0.2}


def make(base) -> Trainer:
    """Policies of two losses and two optimizers, two of them with dropout."""
    loss, chosen = LossConfig("reinforce"), {"a": USUAL, "b": DIMUON}
    losses = {"a": LossConfig("importance_sampling")}
    policies = []
    for i, (n, r) in enumerate(RANKS.items()):
        how = chosen.get(n, OptimizerConfig(3e-3)), losses.get(n, loss), i
        policies.append(PolicyConfig(n, AdapterConfig(r), *how, dropout=DROPOUT.get(n, 0.0)))
    return Trainer(base, policies)


def poisoned(groups, value):
    """A copy of the groups with one advantage replaced."""
    groups = copy.deepcopy(groups)
    groups[0].sequences[0].advantages[1] = value
    return groups


def slot(trainer, name):
    """Everything the training state has of one policy, copied: factors, moments, gradient sum,
    counters.
    """
    at = trainer.slots[name]
    return jax.tree.map(
        lambda x: np.array(x).take(at.index, state_lib.slot_axis(x)), trainer.state[at.bucket]
    )


def bits(tree):
    """Every number as the integer that its bits are: 0 and -0 differ, NaN equals itself."""
    return jax.tree.map(lambda x: np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}"), tree)


def assert_same_bits(x, y):
    chex.assert_trees_all_equal(bits(x), bits(y), strict=True)


def scores(trainer, texts):
    """Logprobs of the texts under a, b, c and the base, in one batch."""
    owners = [*trainer.slots.values(), None]
    found = Scorer(trainer.base).logprobs(texts[: len(owners)], owners, trainer.stacks)
    return dict(zip([*RANKS, "base"], found))


# and the router: every product that a policy takes part in
TARGETS = (ALL_LINEAR, "embed", "unembed")
LARGE = np.float32(1e30)
WARM = {"temperature": 0.3, "top_k": 5, "top_p": 0.6, "min_p": 0.1, "max_tokens": 3, "seed": 4}
PENALTIES = {"frequency_penalty": 1e6, "presence_penalty": -2.0, "logit_bias": ((1, -1e30),)}
EXTREMES = {
    "weight decay": {"optimizer": OptimizerConfig(1e-2, weight_decay=50.0)},
    "huge rate": {"optimizer": OptimizerConfig(1e9)},
    "no clipping, rate beyond float32": {"optimizer": OptimizerConfig(1e30, max_grad_norm=0.0)},
    "tight clipping": {"optimizer": OptimizerConfig(1e-2, max_grad_norm=1e-12)},
    "odd moments": {"optimizer": OptimizerConfig(b1=0.0, b2=0.5, eps=1e3, warmup_steps=5)},
    "another optimizer": {"optimizer": DIMUON},
    "another loss": {"loss": LossConfig("cispo", band_low=0.9, band_high=1.1)},
    "another way to sample": {"sampling": WARM},
    "penalties": {"sampling": PENALTIES | {"seed": 4}},
    "nan advantage": {"advantage": np.nan},
    "infinite advantage": {"advantage": np.inf},
    "nan weights": {"weights": lambda factor: factor.fill(np.nan)},
    "one infinite weight": {"weights": lambda x: x[0].reshape(-1, x.shape[-1])[0].fill(np.inf)},
    "weights that overflow activations": {"weights": lambda x: np.multiply(x, LARGE, out=x)},
}
DROPS = {"dropout": {"dropout": 0.5}, "dropout of nearly all": {"dropout": 0.9}}
# every update of a
SKIPS = {"nan advantage", "infinite advantage", "nan weights", "one infinite weight"}


class Company:
    """Policies a, b and c in training, with random adapters, and what b, c and the base get beside
    an a that does as it is told.
    """

    def __init__(self, base, rng, ranks=RANKS, drops=False, kinds=None):
        vocab = base.cfg.vocab_size
        targets = TARGETS if "moe" not in base.cfg.stacks else (*TARGETS, "router")
        configs = {n: AdapterConfig(r, targets=targets) for n, r in ranks.items() if r}
        biased = biased_targets(transformer.abstract(base.cfg))
        bias = AdapterConfig(kind="bias", targets=biased)
        configs = {n: configs.get(n, bias) for n in ranks}
        configs |= {n: dataclasses.replace(configs[n], kind=k) for n, k in (kinds or {}).items()}
        if drops:  # a and c adapt only what may be dropped
            known = lora_tree.target_paths(transformer.abstract(base.cfg))
            apart = {*lora_tree.UNDROPPED}
            own = tuple(n for n, ps in known.items() if not apart & {*"/".join(ps).split("/")})
            configs |= {n: AdapterConfig(ranks[n], targets=own) for n in "ac"}
        if base.cfg.routed:  # a's neighbour in a stack of both forms
            configs["b"] = dataclasses.replace(configs["b"], experts="shared_outer")
        others = {n: OptimizerConfig(learning_rate=3e-3) for n in ranks} | {"b": DIMUON}
        loss = LossConfig("reinforce")
        usual = {"optimizer": USUAL, "loss": LossConfig("importance_sampling")}
        self.usual = PolicyConfig("a", configs["a"], **usual)
        policies = {n: PolicyConfig(n, c, others[n], loss) for n, c in configs.items()}
        self.trainer = Trainer(base, list((policies | {"a": self.usual}).values()))
        self.shardings = jax.tree.map(lambda x: x.sharding, self.trainer.state)
        self.start = jax.tree.map(np.array, self.trainer.state)
        # B is not zero, so that every product matters; rows behind the true rank stay zero
        for name, rank in ranks.items():
            at = self.trainer.slots[name]
            for factor in jax.tree.leaves(self.start[at.bucket].adapters.factors):
                mine = factor[:, at.index, ..., : rank or 1, :]
                mine[...] = 0.2 * rng.normal(size=mine.shape)
        self.steps = [{n: random_groups(rng, vocab) for n in ranks} for _ in range(2)]
        self.texts = rng.integers(3, vocab, (len(ranks) + 1, 13)).tolist()
        self.engine, self.scorer = Engine(base), Scorer(base)

    def run(self, advantage=None, weights=None, sampling=None, **changes):
        """{policy: everything that it has got}, and whether a skipped."""
        trainer, at = self.trainer, self.trainer.slots["a"]
        trainer.policies["a"] = dataclasses.replace(self.usual, **changes)
        state = jax.tree.map(np.copy, self.start)
        if weights is not None:
            for factor in jax.tree.leaves(state[at.bucket].adapters.factors):
                weights(factor[:, at.index])
        trainer.state = dict(jax.device_put(state, self.shardings))
        seen = {name: [] for name in (*trainer.slots, "base")}
        skipped = []
        for groups in self.steps:
            given = groups
            if advantage is not None:
                given = groups | {"a": poisoned(groups["a"], advantage)}
            # gradient sums; the rest
            for metrics in (trainer.forward_backward(given), trainer.optim_step(list(given))):
                for name in given:
                    seen[name].append((metrics[name], slot(trainer, name)))
            skipped.append(metrics["a"]["skipped"])
        owners = dict(trainer.slots) | {"base": None}
        how = {"n": 2, "max_tokens": 6, "temperature": 1.0, "seed": 3}
        own = {"a": sampling or {}}
        requests = [
            Request(tuple(text[:5]), owners[n], **(how | own.get(n, {})))
            for text, n in zip(self.texts, owners, strict=True)
        ]
        sampled = self.engine.generate(requests, trainer.stacks)
        scored = self.scorer.logprobs(self.texts, list(owners.values()), trainer.stacks)
        for name, completions, values in zip(owners, sampled, scored):
            seen[name].append(([(c.tokens, c.logprobs) for c in completions], values))
        return seen, skipped

    def check(self, extremes):
        quiet, skipped = self.run()
        assert skipped == [0, 0]
        for extreme in extremes:
            loud, skipped = self.run(**extremes[extreme])
            for name in set(quiet) - {"a"}:
                try:
                    assert_same_bits(quiet[name], loud[name])
                except AssertionError as difference:
                    raise AssertionError(f"{extreme} of a has changed {name}") from difference
            with pytest.raises(AssertionError):  # a did something unusual
                assert_same_bits(quiet["a"], loud["a"])
            assert extreme not in SKIPS or skipped == [1, 1], f"{extreme}: a skipped {skipped}"


# a is a bias, and so is its neighbour c; or only d is
BIASES = ({"c": 0, "a": 0, "b": 3}, RANKS | {"d": 0})


@pytest.mark.parametrize("ranks", BIASES, ids=["a", "d"])
def test_a_bias_changes_no_bit_of_the_others_and_others_none_of_it(ranks, tiny_base, rng):
    extremes = ("nan advantage", "nan weights", "weights that overflow activations")
    Company(tiny_base("llama"), rng, ranks).check({n: EXTREMES[n] for n in extremes})


def test_policies_that_share_an_output_basis_change_no_bit_of_each_other(tiny_base, rng):
    extremes = "infinite advantage", "one infinite weight", "weights that overflow activations"
    kinds = {"a": "basis", "b": "basis"}
    company = Company(tiny_base("llama"), rng, kinds=kinds)
    company.check({n: EXTREMES[n] for n in extremes})


MARKS = {"qwen3_moe": (), "llama": pytest.mark.long}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=MARKS.get(f, pytest.mark.slow)) for f in oracles.TINY]
)
def test_a_policy_of_the_same_batch_changes_no_bit_of_the_others(family, tiny_base, rng):
    Company(tiny_base(family), rng).check(EXTREMES)


SPARSE = ("qwen3_moe", "deepseek_v3", "moonlight", "deepseek_v32", "glm", "glm4", "glm4_lite")


@pytest.mark.slow
@pytest.mark.parametrize("family", SPARSE)
def test_nor_in_the_form_of_accelerators(family, tiny_base, form_of_accelerators, rng):
    Company(tiny_base(family), rng).check(EXTREMES)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("deepseek_v3", "qwen3_next"))],
)
def test_nor_does_its_dropout(family, tiny_base, rng):
    """Where nobody else drops, so that all others' program is another one, and where c does."""
    company = Company(tiny_base(family), rng, drops=True)
    company.check(DROPS)
    policies = company.trainer.policies
    policies["c"] = dataclasses.replace(policies["c"], dropout=0.3)
    company.check(DROPS)


def over_mesh(family, name, way, tmp_path, monkeypatch):
    """That family's base over eight devices, whose experts' tokens travel that way."""
    monkeypatch.setattr(expert_parallel, "GATHER_TOKENS", {"gather": 1 << 30, "all_to_all": 0}[way])
    jax.clear_caches()  # programs of the other way have the same shapes
    return base_lib.load(save_checkpoint(family, tmp_path), make_mesh(MESHES[name]))


WAYS = [
    ("dense", "gather"),
    *((family, way) for family in ("experts", "indexed") for way in ("gather", "all_to_all")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("family", "way"), WAYS)
def test_nor_over_a_mesh(family, name, way, tmp_path, monkeypatch, rng):
    Company(over_mesh(family, name, way, tmp_path, monkeypatch), rng).check(EXTREMES)


def test_stepping_one_policy_leaves_what_others_have_accumulated(tiny_base, rng):
    base = tiny_base("llama")
    texts = rng.integers(3, base.cfg.vocab_size, (4, 16)).tolist()
    groups = {n: random_groups(rng, base.cfg.vocab_size) for n in RANKS}
    trainer, alone = make(base), make(base)
    trainer.forward_backward({"b": groups["b"]})
    kept, known = {n: slot(trainer, n) for n in ("b", "c")}, scores(trainer, texts)
    assert any(np.any(x) for x in jax.tree.leaves(kept["b"].grad_sum))
    for value in (1.0, np.nan, 1e30):
        trainer.update({"a": poisoned(groups["a"], value)})
    for name in ("b", "c"):
        assert_same_bits(slot(trainer, name), kept[name])
    now = scores(trainer, texts)
    for name in ("b", "c", "base"):
        assert_same_bits(now[name], known[name])
    for t in (trainer, *[alone] * 2):
        t.forward_backward({"b": groups["b"]})
    for t in (trainer, alone):
        t.optim_step(["b"])
    assert_same_bits(slot(trainer, "b"), slot(alone, "b"))


def test_policies_together_are_policies_one_by_one(tiny_base, rng):
    base = tiny_base("llama")
    prompts = {"a": 2, "b": 2, "c": 1}.items()
    groups = {name: random_groups(rng, base.cfg.vocab_size, n) for name, n in prompts}
    together, alone = make(base), make(base)
    metrics = together.forward_backward(groups)
    for name in RANKS:
        mine = alone.forward_backward({name: groups[name]})[name]
        for key, value in mine.items():
            # float32 sums over other numbers of rows are ordered otherwise: a few units of the last
            # place, of terms up to about 1
            assert metrics[name][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, key)
    for name in RANKS:
        found, wanted = (slot(t, name).grad_sum for t in (together, alone))
        largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
        # as above, relative to the policy's largest gradient
        chex.assert_trees_all_close(found, wanted, rtol=0, atol=1e-5 * largest)
    # the same gradient sums, so that the updates can be compared closely
    alone.state = jax.tree.map(np.array, together.state)
    together.optim_step(list(RANKS))
    for name in RANKS:
        alone.optim_step([name])
    # 1e-5: the clipping norm sums squares in another order, and Adam divides by their root
    for name in RANKS:
        chex.assert_trees_all_close(slot(together, name), slot(alone, name), rtol=1e-5, atol=1e-9)


PAIR = {"a": 3, "b": 3}


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v3", "glm"])
def test_in_short_no_bit_changes_in_other_families(family, tiny_base, rng):
    Company(tiny_base(family), rng, PAIR).check(EXTREMES)


@pytest.mark.long
def test_in_short_no_bit_changes_in_the_form_of_accelerators(tiny_base, form_of_accelerators, rng):
    Company(tiny_base("qwen3_moe"), rng, PAIR).check(EXTREMES)


@pytest.mark.long
def test_in_short_no_bit_changes_over_a_mesh(tmp_path, monkeypatch, rng):
    base = over_mesh("experts", "expert4_tensor2", "all_to_all", tmp_path, monkeypatch)
    Company(base, rng, PAIR).check(EXTREMES)
