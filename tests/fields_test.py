"""Settings check their types and show what differs from the defaults."""

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
        (lambda: LossConfig(clip_high=-1), "loss.clip_high is -1.0; expected at least 0"),
        (lambda: LossConfig(band_low=2.0, band_high=1.0), "loss.band_low is 2.0"),
        (lambda: AdapterConfig("8"), "AdapterConfig: rank is '8'; expected a whole number"),
        (lambda: AdapterConfig(8, targets=3), r"targets is 3; expected a tuple of texts"),
        (lambda: OptimizerConfig("1e-4"), "learning_rate is '1e-4'; expected a number"),
        (lambda: PolicyConfig("a", 8), "PolicyConfig: adapter is 8; expected a AdapterConfig"),
        (
            lambda: fields.check(Request, {"max_token": 3}, "sampling"),
            "has no setting 'max_token', did you mean 'max_tokens'",
        ),
        (lambda: fields.check(Request, {"stop": 1}, "sampling"), "stop is 1; expected a tuple of"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_expected(make, says):
    with pytest.raises(UserError, match=says):
        make()
