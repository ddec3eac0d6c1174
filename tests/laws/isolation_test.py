"""Law 3: whatever one policy does, all others stay bit-identical; a policy whose gradient is not finite skips its own update."""

import jax
import numpy as np
import pytest

from mint_jax.lora.tree import AdapterConfig
from mint_jax.rollout.score import Scorer
from mint_jax.train import state as state_lib
from mint_jax.train.batch import Group, Sequence
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer

RANKS = {"c": 1, "a": 3, "b": 3}  # a and b are neighbours in one stack
USUAL = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)


def make(base, optimizer=USUAL, loss=LossConfig("importance_sampling")) -> Trainer:
    """Policy a as said, b and c as always."""
    others = OptimizerConfig(learning_rate=3e-3), LossConfig("reinforce")
    chosen = {n: (optimizer, loss) if n == "a" else others for n in RANKS}
    return Trainer(base, [PolicyConfig(n, AdapterConfig(r), *chosen[n], seed=i) for i, (n, r) in enumerate(RANKS.items())])


def random_groups(rng, vocab, prompts=2, lengths=(6, 4)):
    def sequence(n):
        return Sequence(rng.integers(3, vocab, n).tolist(), [0.1] * n, rng.normal(size=n).tolist(), (-rng.exponential(size=n)).tolist())

    return [Group(rng.integers(3, vocab, 4).tolist(), [sequence(n) for n in lengths]) for _ in range(prompts)]


def poisoned(groups, value):
    """The groups with one advantage replaced."""
    groups[0].sequences[0].advantages[1] = value
    return groups


def slot(trainer, name):
    """Everything the training state has of one policy, copied: factors, moments, gradient sum, hyperparameters, counters."""
    at = trainer.slots[name]
    return jax.tree.map(lambda x: np.array(x).take(at.index, state_lib.slot_axis(x)), trainer.state[at.bucket])


def assert_same_bits(x, y):
    jax.tree.map(np.testing.assert_array_equal, x, y)


def scores(trainer, texts):
    """Logprobs of the texts under a, b, c and the base, in one batch."""
    owners = [*trainer.slots.values(), None]
    return dict(zip([*RANKS, "base"], Scorer(trainer.base).logprobs(texts[: len(owners)], owners, trainer.stacks)))


EXTREMES = {
    "weight decay": {"optimizer": OptimizerConfig(learning_rate=1e-2, weight_decay=50.0)},
    "no clipping, huge rate": {"optimizer": OptimizerConfig(learning_rate=1e30, max_grad_norm=0.0)},  # overflows in the second step
    "tight clipping": {"optimizer": OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e-12)},
    "odd moments": {"optimizer": OptimizerConfig(b1=0.0, b2=0.5, eps=1e3, warmup_steps=5)},
    "another loss": {"loss": LossConfig("cispo", kl_kind="k3", kl=1e6, band_low=0.9, band_high=1.1)},
    "nan": {"value": np.nan},
    "infinity": {"value": np.inf},
}


@pytest.mark.parametrize("extreme", EXTREMES)
def test_a_policy_of_the_same_batch_changes_no_bit_of_the_others(tiny_base, rng, extreme):
    base = tiny_base("llama")
    texts = rng.integers(3, base.cfg.vocab_size, (4, 16)).tolist()
    steps = [{n: random_groups(rng, base.cfg.vocab_size) for n in RANKS} for _ in range(3)]
    settings = dict(EXTREMES[extreme])
    value = settings.pop("value", None)
    quiet, loud = make(base), make(base, **settings)
    for groups in steps:
        quiet.update(groups)
    for groups in steps:
        loud.update(groups if value is None else groups | {"a": poisoned(groups["a"], value)})
    for name in ("b", "c"):
        assert_same_bits(slot(quiet, name), slot(loud, name))
    calm, wild = scores(quiet, texts), scores(loud, texts)
    for name in ("b", "c", "base"):
        assert_same_bits(calm[name], wild[name])
    assert not np.array_equal(calm["a"], wild["a"]), "a did nothing unusual"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_skips_its_own_update_only(tiny_base, rng, value):
    base = tiny_base("llama")
    good = [{n: random_groups(rng, base.cfg.vocab_size) for n in RANKS} for _ in range(2)]
    bad = {n: random_groups(rng, base.cfg.vocab_size) for n in RANKS}
    bad["a"] = poisoned(bad["a"], value)
    trainer, unharmed = make(base), make(base)
    trainer.update(good[0])
    before = slot(trainer, "a")
    rows = trainer.update(bad)
    assert {n: rows[n]["skipped"] for n in RANKS} == {"a": 1.0, "b": 0.0, "c": 0.0}
    after = slot(trainer, "a")
    assert (after.steps, after.skipped) == (1, 1)
    assert (slot(trainer, "b").steps, slot(trainer, "b").skipped) == (2, 0)
    assert_same_bits((after.adapters, after.opt, after.grad_sum), (before.adapters, before.opt, before.grad_sum))
    for groups in good:  # the next update is what it would have been
        unharmed.update(groups)
    assert trainer.update(good[1])["a"]["skipped"] == 0.0
    assert_same_bits(slot(trainer, "a").adapters, slot(unharmed, "a").adapters)


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
    groups = {n: random_groups(rng, base.cfg.vocab_size, prompts) for n, prompts in (("a", 2), ("b", 2), ("c", 1))}
    together, alone = make(base), make(base)
    metrics = together.forward_backward(groups)
    for name in RANKS:
        mine = alone.forward_backward({name: groups[name]})[name]
        for key, value in mine.items():
            # float32 sums over other numbers of rows are ordered otherwise: a few units of the last place, of terms up to about 1
            np.testing.assert_allclose(metrics[name][key], value, rtol=1e-4, atol=1e-5, err_msg=f"{name} {key}")
    for name in RANKS:
        pairs = zip(jax.tree.leaves(slot(together, name).grad_sum), jax.tree.leaves(slot(alone, name).grad_sum))
        largest = max(np.abs(x).max() for x in jax.tree.leaves(slot(alone, name).grad_sum))
        for x, y in pairs:  # as above, relative to the policy's largest gradient
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest)
    alone.state = jax.tree.map(np.array, together.state)  # the same gradient sums, so that the updates can be compared closely
    together.optim_step(list(RANKS))
    for name in RANKS:
        alone.optim_step([name])
    for name in RANKS:  # 1e-5: the clipping norm sums squares in another order, and Adam divides by their root
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-9), slot(together, name), slot(alone, name))
