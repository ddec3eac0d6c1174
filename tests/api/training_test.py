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
from mint_jax import params
from tests import oracles
from tests.exchange import peft_model, randomise
from tests.train.torch_lora import MODULES

ROWS = [
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"text": "two and two are four"},
    {"prompt": "3 + 4 =", "completion": " 7"},
]


@pytest.fixture
def with_peft(hf_dirs, mesh, tmp_path):
    """The base, and a PEFT directory with random factors, made by PEFT."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    model = randomise(peft.get_peft_model(oracles.torch_model(hf_dirs("llama")), config))
    model.save_pretrained(tmp_path / "peft")
    return mint.load(str(hf_dirs("llama")), mesh=mesh), tmp_path / "peft"


TOKENS, PREFIX = [5, 9, 33, 70, 12, 41, 8, 2], 3


def torch_gradients(hf_dir, directory, loss_of):
    """Returns a loss of the log-probabilities of ``TOKENS``, and its gradients, in float64."""
    model = peft_model(hf_dir, directory).double()
    for name, x in model.named_parameters():
        x.requires_grad_("lora_" in name)
    tokens = torch.tensor([TOKENS])
    logp = torch.log_softmax(model(tokens).logits[0, :-1], -1).gather(-1, tokens[0, 1:, None])[:, 0]
    loss = loss_of(logp)
    loss.backward()
    named = model.named_parameters()
    return float(loss.detach()), {n: x.grad.numpy() for n, x in named if "lora_" in n}


def assert_close(gradients, expected):
    assert len(jax.tree.leaves(gradients)) == 4
    for path, leaf in params.leaves_with_path(gradients):
        owner, _, factor = path.rpartition("/")
        for layer, found in enumerate(leaf):
            module = f"base_model.model.{MODULES[owner].format(layer)}"
            wanted = expected[f"{module}.lora_{factor.upper()}.default.weight"]
            # float32 against float64: an element is a sum of terms as large as the largest
            atol = 1e-5 * np.abs(wanted).max()
            got = found if factor == "a" else found.T
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=atol)


@pytest.mark.long
def test_gradients_start_and_export_agree_with_peft(with_peft, hf_dirs, tmp_path):
    base, directory = with_peft
    n = len(TOKENS) - PREFIX
    sequence = mint.TrainSequence(TOKENS[PREFIX:], [1 / n] * n, [0.5] * n)
    group = mint.Group(TOKENS[:PREFIX], [sequence])
    plain = base.policy("plain", start=directory)
    assert (plain.config.adapter.rank, plain.config.adapter.alpha, plain.steps) == (3, 6.0, 0)
    quadratic = lambda t: jnp.square(t.logp + t.advantages)  # noqa: E731
    own = base.policy("own", start=directory, loss=quadratic)
    oracle = {
        "plain": lambda logp: -logp[PREFIX - 1 :].mean(),
        "own": lambda logp: ((logp[PREFIX - 1 :] + 0.5) ** 2).mean(),
    }
    found = base.gradients({"plain": [group], own: [group]})
    for name, loss_of in oracle.items():
        policy = base.policies[name]
        value, expected = torch_gradients(hf_dirs("llama"), directory, loss_of)
        before = policy.adapter()
        assert policy.forward_backward([group])["loss"] == pytest.approx(value, rel=1e-5)
        chex.assert_trees_all_equal(policy.adapter(), before)
        assert_close(found[name], expected)
        assert_close(policy.gradients(), expected)
    out = plain.export(tmp_path / "out")
    assert torch_gradients(hf_dirs("llama"), out, oracle["plain"])[1], "PEFT loads the export"
    with mint.open(tmp_path / "catalog", create=True) as store:
        plain.save(store)
        stored = store["plain@latest"]
        base.export(stored, tmp_path / "stored")
        started = [base.policy("again", start=out), base.policy("stored", start=stored)]
    for policy in started:
        chex.assert_trees_all_equal(policy.adapter(), plain.adapter())
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "stored" / file).read_bytes() == (out / file).read_bytes()
    kl = mint.LossConfig("cross_entropy", kl_kind="k3", kl=1.0)
    near = base.policy("near", 2, targets=["q"], loss=kl, reference=out)
    assert near.config.loss.reference == str(out)
    assert near.forward_backward([group])["kl"] > 1e-4, "its adapter is not the reference"
    same = base.policy("same", start=out, loss=kl).forward_backward([group])["kl"]
    assert same == pytest.approx(0.0, abs=1e-6)
    for call, says in (
        (lambda: base.policy("x", reference=out), "reference is given, but .* compares with noth"),
        (lambda: base.policy("x", 4, start=out), "rank and start are both given"),
        (lambda: plain.export(out), "is not empty"),
    ):
        with pytest.raises(mint.UserError, match=says):
            call()


@pytest.mark.long
def test_a_saved_state_goes_on_bit_for_bit(load, tmp_path):
    loss = mint.LossConfig("cross_entropy", kl_kind="k3", kl=0.1)
    drawing = {"temperature": 1.0, "max_tokens": 6}
    rows = [*ROWS[1:], {"text": "one more row, which is longer than the others are, by some words"}]

    def goes_on(policy):
        metrics = [policy.train_step(rows) for _ in range(2)]
        [drawn] = policy.completions(["2 + 2 ="], n=4, **drawing)
        state = policy.save_state(tmp_path / "states" / "later.state").read_bytes()
        return metrics, policy.adapter(), [c.tokens for c in drawn], state

    with load() as base:
        policy = base.policy("a", 3, targets=["q", "down"], learning_rate=1e-2, loss=loss)
        policy.train_step(ROWS)
        with mint.open(tmp_path / "catalog", create=True) as store:
            policy.save(store)
            start = store["a@latest"]
            how = {"loss": loss, "learning_rate": 1e-2, "dropout": 0.3}
            started = base.policy("b", start=start, **how)
        base.remove("a")
        started.train_step(ROWS)
        started.forward_backward(ROWS[:1])
        started.completions(["2"], n=2, **drawing)
        file = started.save_state(tmp_path / "states" / "b.state")
        expected = goes_on(started)
    with load() as base:
        again = base.resume(file)
        assert (again.name, again.steps, again.draws) == ("b", 1, 1)
        assert (again.config.adapter.rank, again.config.loss) == (3, loss)
        assert again.config.dropout == 0.3
        found = goes_on(again)
        chex.assert_trees_all_equal(found[:2], expected[:2])
        assert found[2:] == expected[2:]
    file.write_bytes(file.read_bytes()[:-7])
    with load() as base, pytest.raises(mint.UserError, match=r"b\.state"):
        base.resume(file)


@pytest.mark.long
def test_a_removed_policy_is_gone_and_its_name_is_free(load):
    base = load()
    kept, gone = (base.policy(n, 3, targets=["q"], learning_rate=1e-2) for n in ("kept", "gone"))
    base.train_step({"kept": ROWS, "gone": ROWS[:1]})
    before = kept.adapter(), kept.gradients()
    base.remove(gone)
    assert base.trainer.state[4].adapters.slots == 1, "its memory is free"
    chex.assert_trees_all_equal((kept.adapter(), kept.gradients()), before)
    for use in (lambda: gone.train_step(ROWS), lambda: gone.sample("2"), gone.adapter):
        with pytest.raises(mint.UserError, match="'gone' was removed: make it again"):
            use()
    with pytest.raises(mint.UserError, match="policy is 'gone'; choose one of: kept"):
        base.train_step({"gone": ROWS})
    base.policy("gone", 9, targets=["v"]).remove()
    kept.remove()
    base.policy("kept", 2, targets=["q"]).train_step(ROWS[:1])
    assert repr(kept) == "Policy('kept', not in training)"
