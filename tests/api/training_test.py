"""Training by hand: several policies in one pass, gradients, states, custom losses; against
policies one by one, and PEFT.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

import mint_jax as mint
from mint_jax.train import step as step_lib
from tests import oracles
from tests.exchange import peft_model, randomise

ROWS = [
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"text": "two and two are four"},
    {"prompt": "3 + 4 =", "completion": " 7"},
]
PAIRS = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}]


def test_one_step_over_policies_of_different_ranks_and_losses_is_one_pass_and_equals_them_one_by_one(  # noqa: E501
    load, monkeypatch
):
    kinds = {"a": (3, "cross_entropy", ROWS), "b": (9, "dpo", PAIRS)}

    def make(model, names):
        return [
            model.policy(
                n, kinds[n][0], targets=["q", "down"], loss=kinds[n][1], learning_rate=1e-2
            )
            for n in names
        ]

    together, rows = load(), {name: rows for name, (_, _, rows) in kinds.items()}
    policies = make(together, kinds)
    calls, inner = [], step_lib.forward_backward
    monkeypatch.setattr(
        step_lib,
        "forward_backward",
        lambda *args, **settings: calls.append(1) or inner(*args, **settings),
    )
    metrics = together.forward_backward(rows)
    assert len(calls) == 1
    for policy in policies:
        alone = load()
        [same] = make(alone, [policy.name])
        expected = same.forward_backward(rows[policy.name])
        for name in ("loss", "logp", "tokens"):  # float32 sums in another order
            assert metrics[policy.name][name] == pytest.approx(expected[name], rel=1e-5), (
                policy.name,
                name,
            )
        chex.assert_trees_all_close(policy.gradients(), same.gradients(), rtol=1e-4, atol=1e-7)
    updated = together.optim_step(["a", policies[1]])
    assert [updated[name]["skipped"] for name in kinds] == [0.0, 0.0]
    before = [policy.adapter() for policy in policies]
    stepped = together.train_step(rows)
    assert len(calls) == 4
    assert stepped["a"]["loss"] < metrics["a"]["loss"]
    assert stepped["b"]["margin"] > metrics["b"]["margin"]
    for policy, old in zip(policies, before):
        assert any(
            (x != y).any() for x, y in zip(jax.tree.leaves(policy.adapter()), jax.tree.leaves(old))
        )
    with pytest.raises(mint.UserError, match=r"rows\[1\] is 'x'; expected a dict"):
        together.train_step({"a": ROWS, policies[1]: [PAIRS[0], "x"]})
    assert [policy.steps for policy in policies] == [2, 2], "a row that is refused updates nobody"


@pytest.fixture
def with_peft(hf_dirs, mesh, tmp_path):
    """A PEFT directory with random factors, made by PEFT, and the base."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    randomise(peft.get_peft_model(oracles.torch_model(hf_dirs("llama")), config)).save_pretrained(
        tmp_path / "peft"
    )
    return mint.load(str(hf_dirs("llama")), mesh=mesh), tmp_path / "peft"


def torch_gradients(hf_dir, directory, loss_of):
    """Gradients of a loss of the log-probabilities of ``TOKENS``, by module, in float64."""
    model = peft_model(hf_dir, directory).double()
    for name, x in model.named_parameters():
        x.requires_grad_("lora_" in name)
    tokens = torch.tensor([TOKENS])
    logp = torch.log_softmax(model(tokens).logits[0, :-1], -1).gather(-1, tokens[0, 1:, None])[:, 0]
    loss = loss_of(logp)
    loss.backward()
    return float(loss.detach()), {
        name: x.grad.numpy() for name, x in model.named_parameters() if "lora_" in name
    }


TOKENS, PREFIX = [5, 9, 33, 70, 12, 41, 8, 2], 3


@pytest.mark.long
def test_gradients_start_and_export_agree_with_peft(with_peft, hf_dirs, tmp_path):
    base, directory = with_peft
    plain = base.policy("plain", start=directory)
    assert (plain.config.adapter.rank, plain.config.adapter.alpha, plain.steps) == (3, 6.0, 0)
    n = len(TOKENS) - PREFIX
    group = mint.Group(
        TOKENS[:PREFIX], [mint.TrainSequence(TOKENS[PREFIX:], [1 / n] * n, [0.5] * n)]
    )

    def quadratic(t):
        return jnp.square(t.logp + t.advantages)

    own = base.policy("own", start=directory, loss=quadratic)
    oracle = {
        "plain": lambda logp: -logp[PREFIX - 1 :].mean(),
        "own": lambda logp: ((logp[PREFIX - 1 :] + 0.5) ** 2).mean(),
    }
    found = base.gradients({"plain": [group], own: [group]})
    for name, loss_of in oracle.items():
        value, expected = torch_gradients(hf_dirs("llama"), directory, loss_of)
        before = base.policies[name].adapter()
        metrics = base.policies[name].forward_backward([group])
        assert metrics["loss"] == pytest.approx(value, rel=1e-5)
        chex.assert_trees_all_equal(base.policies[name].adapter(), before)
        for gradients in (found[name], base.policies[name].gradients()):
            assert len(jax.tree.leaves(gradients)) == 4
            for target, module in (("attn/q", "self_attn.q_proj"), ("mlp/down", "mlp.down_proj")):
                tree = gradients["dense"]
                for part in target.split("/"):
                    tree = tree[part]
                for layer in range(3):
                    key = f"base_model.model.model.layers.{layer}.{module}.lora_{{}}.default.weight"
                    for found_one, factor in ((tree["a"][layer], "A"), (tree["b"][layer].T, "B")):
                        wanted = expected[key.format(factor)]
                        # float32 against float64: an element is a sum of terms as large as the
                        # largest element
                        np.testing.assert_allclose(
                            found_one, wanted, rtol=2e-4, atol=1e-5 * np.abs(wanted).max()
                        )
    out = plain.export(tmp_path / "out")
    again = base.policy("again", start=out)
    chex.assert_trees_all_equal(again.adapter(), plain.adapter())
    _, expected = torch_gradients(hf_dirs("llama"), out, oracle["plain"])
    assert expected, "PEFT loads what export wrote"
    with mint.open(tmp_path / "catalog", create=True) as store:
        plain.save(store)
        base.export(store["plain@latest"], tmp_path / "stored")
        from_store = base.policy("from_store", start=store["plain@latest"])
    chex.assert_trees_all_equal(from_store.adapter(), plain.adapter())
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "stored" / file).read_bytes() == (out / file).read_bytes()
    with pytest.raises(mint.UserError, match=r"reference is given, but .* compares with nothing"):
        base.policy("x", reference=out)
    kl = mint.LossConfig("cross_entropy", kl_kind="k3", kl=1.0)
    near = base.policy("near", 2, targets=["q"], loss=kl, reference=out)
    assert near.config.loss.reference == str(out)
    own_reference = near.forward_backward([group])["kl"]
    assert own_reference > 1e-4, "a fresh adapter is not the reference's"
    assert base.policy("same", start=out, loss=kl).forward_backward([group])["kl"] == pytest.approx(
        0.0, abs=1e-6
    )
    with pytest.raises(mint.UserError, match="rank and start are both given"):
        base.policy("x", 4, start=out)
    with pytest.raises(mint.UserError, match="is not empty"):
        plain.export(out)


def test_gradients_of_rows_change_nothing(model):
    policy = model.policy("gradients", 2, targets=["q"])
    policy.forward_backward(ROWS[:1])
    pending, version = policy.gradients(), model.trainer.versions["gradients"]
    of_rows = policy.gradients(ROWS[1:])
    chex.assert_trees_all_equal(policy.gradients(), pending)
    assert model.trainer.versions["gradients"] == version, "the sampler's cache of it is still good"
    policy.forward_backward(ROWS[1:])
    both = jax.tree.map(np.add, pending, of_rows)
    chex.assert_trees_all_close(policy.gradients(), both, rtol=1e-5, atol=1e-7)
    policy.optim_step()
    assert not any(leaf.any() for leaf in jax.tree.leaves(policy.gradients()))
    model.remove("gradients")


@pytest.mark.long
def test_a_saved_state_goes_on_bit_for_bit(load, tmp_path):
    with load() as base:
        policy = base.policy(
            "a",
            3,
            targets=["q", "down"],
            learning_rate=1e-2,
            loss=mint.LossConfig("cross_entropy", kl_kind="k3", kl=0.1),
        )
        policy.train_step(ROWS)
        with mint.open(tmp_path / "catalog", create=True) as store:
            policy.save(store)
            started = base.policy(
                "b", start=store["a@latest"], loss=policy.config.loss, learning_rate=1e-2
            )
        base.remove("a")
        started.train_step(ROWS)
        started.forward_backward(ROWS[:1])
        started.completions(["2"], n=2, temperature=1.0, max_tokens=3)
        file = started.save_state(tmp_path / "states" / "b.state")
        rows = [
            *ROWS[1:],
            {"text": "one more row, which is longer than the others are, by some words at least"},
        ]
        expected = [started.train_step(rows) for _ in range(2)], started.adapter()
        drawn = [
            c.tokens
            for c in started.completions(["2 + 2 ="], n=4, temperature=1.0, max_tokens=6)[0]
        ]
        pending = started.save_state(tmp_path / "states" / "later.state")
        assert pending.read_bytes() != file.read_bytes()
    with load() as base:
        again = base.resume(file)
        assert (again.name, again.steps, again.draws) == ("b", 1, 1)
        assert (
            again.config.adapter.rank,
            again.config.optimizer.learning_rate,
            again.config.loss.kl,
        ) == (3, 1e-2, 0.1)
        found = [again.train_step(rows) for _ in range(2)], again.adapter()
        assert found[0] == expected[0]
        chex.assert_trees_all_equal(found[1], expected[1])
        assert [
            c.tokens for c in again.completions(["2 + 2 ="], n=4, temperature=1.0, max_tokens=6)[0]
        ] == drawn
        assert again.save_state(tmp_path / "again.state").read_bytes() == pending.read_bytes()
        with pytest.raises(mint.UserError, match="'b' is in training already"):
            base.resume(file)
    file.write_bytes(file.read_bytes()[:-7])
    with load() as base, pytest.raises(mint.UserError, match=r"b\.state"):
        base.resume(file)


@pytest.mark.long
def test_a_removed_policy_is_gone_and_its_name_is_free(load):
    base = load()
    kept = base.policy("kept", 3, targets=["q"], learning_rate=1e-2)
    gone = base.policy("gone", 3, targets=["q"], learning_rate=1e-2)
    last = base.policy("last", 3, targets=["q"], learning_rate=1e-2)
    base.train_step({"kept": ROWS, "gone": ROWS[:1], "last": ROWS[1:]})
    before = kept.adapter(), last.adapter(), last.gradients()
    texts = [policy.sample("2 + 2 =", max_tokens=4) for policy in (kept, last)]
    base.remove(gone)
    assert list(base.policies) == ["kept", "last"]
    assert base.trainer.state[4].adapters.slots == 2, "its memory is free"
    chex.assert_trees_all_equal((kept.adapter(), last.adapter(), last.gradients()), before)
    assert [policy.sample("2 + 2 =", max_tokens=4) for policy in (kept, last)] == texts
    assert last.steps == 1
    for use in (
        lambda: gone.train_step(ROWS),
        lambda: gone.sample("2"),
        lambda: gone.steps,
        gone.adapter,
        gone.remove,
    ):
        with pytest.raises(mint.UserError, match="'gone' was removed: make it again"):
            use()
    with pytest.raises(mint.UserError, match="policy is 'gone'; choose one of: kept, last"):
        base.train_step({"gone": ROWS})
    new = base.policy("gone", 9, targets=["v"])
    with pytest.raises(mint.UserError, match="removed, and another policy has its name now"):
        gone.train_step(ROWS)
    with pytest.raises(mint.UserError, match="choose one of"):
        base.train_step({gone: ROWS})
    new.train_step(ROWS)
    for policy in (kept, last, new):
        policy.remove()
    assert base.policies == base.trainer.state == {}
    base.policy("kept", 2, targets=["q"]).train_step(ROWS[:1])
    assert repr(kept) == "Policy('kept', not in training)"


def test_custom_losses_are_functions_or_registered_names_in_configs_too(
    model, tmp_path, monkeypatch
):
    def focal(t):
        return -((1 - jnp.exp(t.logp)) ** 2) * t.logp

    mint.register_loss("focal", focal)
    by_name, by_function = (
        model.policy(name, 2, targets=["q"], loss=loss, seed=1)
        for name, loss in (("n", "focal"), ("f", focal))
    )
    assert by_name.config.loss == by_function.config.loss == mint.LossConfig("focal")
    plain = model.policy("p", 2, targets=["q"], loss=lambda t: -t.logp)
    named = model.policy("q", 2, targets=["q"])
    metrics = model.forward_backward({"n": ROWS, "p": ROWS, "q": ROWS})
    assert metrics["n"]["loss"] < metrics["q"]["loss"] == metrics["p"]["loss"]
    assert metrics["q"].keys() == metrics["p"].keys() == {"loss", "tokens", "logp"}
    chex.assert_trees_all_close(
        plain.gradients()["dense"]["attn"]["q"]["a"],
        0 * plain.gradients()["dense"]["attn"]["q"]["a"],
    )
    for policy in (by_name, by_function, plain, named):
        policy.remove()
    policies = {
        "a": {
            "data": {"env": "digit_sum"},
            "adapter": {"rank": 2, "targets": ("q",)},
            "loss": {"kind": "focal"},
        }
    }
    config = mint.config("sft", base="tiny-random", steps=1, tensorboard=False, policies=policies)
    assert config.policies["a"].loss.kind == "focal"


def test_rows_that_train_nothing_are_refused_with_what_is_needed(model):
    policy = model.policy("needs", 2, targets=["q"], loss="ppo")
    with pytest.raises(
        mint.UserError,
        match=(
            r"loss 'ppo' needs advantages and old_logp, which rows of texts do not"
            r" have.*mint\.groups"
        ),
    ):
        policy.train_step(ROWS)
    [[completion]] = policy.completions(["2"], temperature=1.0, max_tokens=3)
    n = len(completion.tokens)
    group = mint.Group([5], [mint.TrainSequence(completion.tokens, [1.0] * n)])
    with pytest.raises(mint.UserError, match="sequence 0 has no advantages"):
        policy.train_step([group])
    assert policy.steps == 0
    policy.remove()
