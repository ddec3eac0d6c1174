"""Settings check their types and show what differs from the defaults."""

import numpy as np
import pytest

from mint_jax import fields
from mint_jax.errors import UserError
from mint_jax.lora.config import AdapterConfig
from mint_jax.rollout.request import Request
from mint_jax.train.config import LossConfig, OptimizerConfig, PolicyConfig


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LossConfig(3), "LossConfig: kind is 3; expected text"),
        (lambda: LossConfig(clip_high=-1), r"loss.clip_high is -1.*expected 0 <= clip_low"),
        (lambda: LossConfig(band_low=2.0, band_high=1.0), "loss.band_low is 2.0"),
        (lambda: AdapterConfig("8"), "AdapterConfig: rank is '8'; expected a whole number"),
        (
            lambda: AdapterConfig(8, targets="q"),
            r"targets is 'q'; expected a list or tuple: write \('q',\)",
        ),
        (lambda: OptimizerConfig("1e-4"), "learning_rate is '1e-4'; expected a number"),
        (lambda: PolicyConfig("a", 8), "PolicyConfig: adapter is 8; expected a AdapterConfig"),
        (
            lambda: fields.check(Request, {"max_token": 3}, "sampling"),
            "has no setting 'max_token', did you mean 'max_tokens'",
        ),
        (lambda: fields.check(Request, {"stop": "x"}, "sampling"), r"stop is 'x'.*write \('x',\)"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_expected(make, says):
    with pytest.raises(UserError, match=says):
        make()


def test_values_that_mean_the_same_are_taken():
    config = AdapterConfig(np.int64(4), np.float32(2), ["q", "v"])
    assert config == AdapterConfig(4, 2.0, ("q", "v"))
    assert [type(value) for value in (config.rank, config.alpha, config.targets)] == [
        int,
        float,
        tuple,
    ]
    assert OptimizerConfig(learning_rate=1).learning_rate == 1.0
    assert fields.check(Request, {"logit_bias": [[1, 2]]}, "sampling") == {
        "logit_bias": ((1, 2.0),)
    }
    assert LossConfig(clip_low=None).low == 0.2


def test_a_setting_shows_what_differs_from_its_default():
    assert repr(LossConfig()) == "LossConfig()"
    assert repr(LossConfig("gspo", clip_high=0.3)) == "LossConfig(kind='gspo', clip_high=0.3)"
    assert (
        repr(PolicyConfig("a", AdapterConfig(4, targets=("q",))))
        == "PolicyConfig(name='a', adapter=AdapterConfig(rank=4, targets=('q',)))"
    )
