"""Every door of the Python face refuses what it cannot mean with a UserError, before anything is
computed.
"""

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


WRONG = {
    "a str for prompts": (
        lambda m, p, s: p.completions("2"),
        r"prompts is '2'; expected a list: write \[\.\.\.\]",
    ),
    "unknown setting": (
        lambda m, p, s: p.sample("2", temprature=1.0),
        "'temprature', did you mean 'temperature'.*choose from n, max_tokens",
    ),
    "n": (
        lambda m, p, s: p.completions(["2"], n=8),
        "n is 8 at temperature 0, which gives equal completions: set temperature",
    ),
    "a name for a revision": (
        lambda m, p, s: m.sample("2", "p@latest"),
        r"revision is 'p@latest'; expected store\['policy@latest'\]",
    ),
    "strings for rows": (
        lambda m, p, s: p.train_step(["x"]),
        r"rows\[0\] is 'x'; expected a dict with {'messages'} or {'prompt', 'completion'}",
    ),
    "a row and a group": (
        lambda m, p, s: p.train_step([group(), ROWS[0]]),
        r"rows\[1\] is .*expected only groups",
    ),
    "NaN weight": (
        lambda m, p, s: p.train_step([group(weights=[NAN, 1.0])]),
        "group 0, sequence 0: weights has nan; expected finite",
    ),
    "rows for a model": (
        lambda m, p, s: m.train_step(ROWS),
        "rows is .*expected a dict from a policy's name to its rows",
    ),
    "remove nobody": (lambda m, p, s: m.remove("nobody"), "policy is 'nobody'"),
    "a taken name": (
        lambda m, p, s: m.policy("p"),
        "policy 'p' is in training already: choose another name",
    ),
    "alpha": (
        lambda m, p, s: m.policy("x", alpha=-1.0),
        "alpha is -1.0; expected a finite number above 0",
    ),
    "an unknown target": (
        lambda m, p, s: m.policy("x", targets=["qq"]),
        "target 'qq' is not a projection of this base; choose from",
    ),
    "an unknown loss": (
        lambda m, p, s: m.policy("x", loss="grpo"),
        "loss is 'grpo'; choose one of: cross_entropy",
    ),
    "start nowhere": (
        lambda m, p, s: m.policy("x", start="nowhere"),
        "start is 'nowhere', which is not a PEFT directory",
    ),
    "resume nothing": (
        lambda m, p, s: m.resume("nothing.state"),
        "nothing.state cannot be read .*save_state",
    ),
    "export of a name": (
        lambda m, p, s: m.export("p@latest", "out"),
        "revision is 'p@latest', which is not a PEFT directory",
    ),
    "an unknown revision": (lambda m, p, s: s["nobody@latest"], "nobody"),
    "load nothing": (lambda m, p, s: mint.load("no-such-base/anywhere/else"), "no-such-base"),
    "run a dict": (
        lambda m, p, s: mint.run({"job": "sft"}, "w"),
        "config is .*expected a config from mint.config",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_refused_before_anything_is_computed(
    name, model, policy, store, monkeypatch
):
    def computed(*args, **settings):
        raise AssertionError("something was computed")

    for step in ("forward_backward", "optim_step", "score"):
        monkeypatch.setattr(step_lib, step, computed)
    call, says = WRONG[name]
    policies, version = list(model.policies), model.trainer.versions["p"]
    with pytest.raises(mint.UserError, match=says):
        call(model, policy, store)
    assert list(model.policies) == list(model.trainer.policies) == policies
    assert model.trainer.versions["p"] == version


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
KEYS = st.sampled_from(["prompt", "completion", "text", "messages", "role", "content"])


@given(
    st.recursive(
        PLAIN,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=6,
    )
)
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


def test_a_place_that_is_not_there_is_no_catalog(tmp_path):
    with pytest.raises(
        mint.UserError,
        match=(
            r"there is no catalog in .*typo: check the path, or make a new one with"
            r" mint\.open\(.*create=True\)"
        ),
    ):
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
    assert repr(store) == f"Store('{tmp_path}/new', closed)"


def test_a_closed_model_says_so(load):
    with load() as base:
        policy = base.policy("a", 2, targets=["q"])
        assert repr(base).startswith("Model('tiny-random', ")
        assert repr(base).endswith("policies: a)")
        assert repr(policy) == "Policy('a', rank 2, cross_entropy, 0 steps)"
        assert len(repr(base.base)) < 300
    for use in (lambda: base.sample("2"), lambda: policy.train_step(ROWS), lambda: policy.steps):
        with pytest.raises(
            mint.UserError, match="the model 'tiny-random' was closed: load it again"
        ):
            use()
    assert (repr(base), repr(policy)) == (
        "Model('tiny-random', closed)",
        "Policy('a', not in training)",
    )
    base.close()
