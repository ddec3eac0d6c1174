"""The Python API refuses mistakes with a UserError, before anything is computed."""

import contextlib
import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import mint_jax as mint
from mint_jax.api import inputs
from mint_jax.train import step as step_lib

ROWS = [{"prompt": "2 + 2 =", "completion": " 4"}]
NAN = float("nan")


@pytest.fixture(scope="module")
def policy(model):
    return model.policy("p", 2, targets=["q"])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with mint.open(tmp_path_factory.mktemp("inputs") / "catalog", create=True) as store:
        yield store


def group(**changes):
    sequence = mint.TrainSequence([5, 6], [0.5, 0.5], [1.0, 1.0], [-1.0, -1.0])
    return mint.Group([3, 4], [dataclasses.replace(sequence, **changes)])


WRONG = [
    (lambda m, p, s: p.completions("2"), r"prompts is '2'; expected a list: write \[\.\.\.\]"),
    (lambda m, p, s: p.sample("2", temprature=1.0), "'temprature', did you mean 'temperature'"),
    (lambda m, p, s: p.completions(["2"], n=8), "n is 8 at temperature 0, which gives equal"),
    (lambda m, p, s: m.sample("2", "p@latest"), r"revision is 'p@latest'; expected store\['pol"),
    (lambda m, p, s: p.train_step(["x"]), r"rows\[0\] is 'x'; expected a dict with {'messages'}"),
    (lambda m, p, s: p.train_step([group(), ROWS[0]]), r"rows\[1\] is .*expected only groups"),
    (lambda m, p, s: p.train_step([group(weights=[NAN, 1.0])]), "sequence 0: weights has nan; exp"),
    (lambda m, p, s: m.train_step(ROWS), "rows is .*expected a dict from a policy's name to its"),
    (lambda m, p, s: m.remove("nobody"), "policy is 'nobody'"),
    (lambda m, p, s: m.policy("p"), "policy 'p' is in training already: choose another name"),
    (lambda m, p, s: m.policy("x", alpha=-1.0), "alpha is -1.0; expected a finite number above 0"),
    (lambda m, p, s: m.policy("x", targets=["qq"]), "target 'qq' is not a projection of this base"),
    (lambda m, p, s: m.policy("x", loss="grpo"), "loss is 'grpo'; choose one of: cross_entropy"),
    (lambda m, p, s: m.policy("x", start="nowhere"), "start is 'nowhere', which is not a PEFT dir"),
    (lambda m, p, s: m.resume("nothing.state"), "nothing.state cannot be read .*save_state"),
    (lambda m, p, s: m.export("p@latest", "out"), "revision is 'p@latest', which is not a PEFT"),
    (lambda m, p, s: s["nobody@latest"], "nobody"),
    (lambda m, p, s: mint.load("no-such-base/anywhere/else"), "no-such-base"),
    (lambda m, p, s: mint.run({"job": "sft"}, "w"), "config is .*expected a config from mint.conf"),
]


@pytest.mark.parametrize(("call", "says"), WRONG, ids=range(len(WRONG)))
def test_mistakes_are_refused_before_anything_is_computed(
    call, says, model, policy, store, monkeypatch
):
    def computed(*args, **settings):
        raise AssertionError("something was computed")

    for step in ("forward_backward", "optim_step", "score"):
        monkeypatch.setattr(step_lib, step, computed)
    policies, version = list(model.policies), model.trainer.versions["p"]
    with pytest.raises(mint.UserError, match=says):
        call(model, policy, store)
    assert list(model.policies) == list(model.trainer.policies) == policies
    assert model.trainer.versions["p"] == version


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
KEYS = st.sampled_from(["prompt", "completion", "text", "messages", "role", "content"])


def around(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)


@given(st.recursive(PLAIN, around, max_leaves=6))
@settings(max_examples=150)
def test_any_value_is_rows_and_prompts_or_a_user_error(model, policy, value):
    for check in (
        lambda: inputs.to_groups(model.base, "p", policy.config.loss, value),
        lambda: inputs.to_groups(model.base, "p", mint.LossConfig("dpo"), value),
        lambda: inputs.encoded(model.base, value),
        lambda: inputs.sampling({"temperature": value}),
        lambda: inputs.sampling({"stop": value}),
        lambda: inputs.as_loss(value),
        lambda: inputs.by_policy(value, model.policies),
        lambda: mint.groups(value, value),
    ):
        with contextlib.suppress(mint.UserError):
            check()


def test_a_missing_catalog_is_made_only_on_request(tmp_path):
    says = r"there is no catalog in .*typo: check the path, or make a new one with mint\.open\("
    with pytest.raises(mint.UserError, match=says):
        mint.open(tmp_path / "typo")
    assert not (tmp_path / "typo").exists()
    with pytest.raises(mint.UserError, match="there is no catalog in sqlite"):
        mint.open(f"sqlite:///{tmp_path}/typo.db", payloads=str(tmp_path / "payloads"))
    store = mint.open(tmp_path / "new", create=True)
    store.close()
    store.close()
    with pytest.raises(mint.UserError, match="was closed: open it again"):
        store["a@latest"]
    with mint.open(tmp_path / "new") as again:
        assert repr(again) == f"Store('{tmp_path}/new')"


def test_a_closed_model_says_so(load):
    with load() as base:
        policy = base.policy("a", 2, targets=["q"])
        assert repr(base).endswith("policies: a)")
        assert repr(policy) == "Policy('a', rank 2, cross_entropy, 0 steps)"
    for use in (lambda: base.sample("2"), lambda: policy.train_step(ROWS), lambda: policy.steps):
        with pytest.raises(mint.UserError, match="the model 'tiny-random' was closed: load it"):
            use()
    assert repr(base) == "Model('tiny-random', closed)"
    base.close()
