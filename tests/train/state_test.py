"""Training state: optimizer configs, and slots that start, hold and pay for one policy each."""

import math

import jax
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.params import ParamSpec
from mint_jax.train import state as state_lib
from mint_jax.train.state import OptimizerConfig

SPECS = {
    "dense": {
        "attn": {
            "q": {"w": ParamSpec((2, 5, 6), (None,) * 3)},
            "k": {"w": ParamSpec((2, 5, 4), (None,) * 3)},
        }
    }
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "step"}, "schedule is 'step'; choose one of: constant, linear, cosine"),
        (
            {"schedule": "linear"},
            (
                "total_steps is 0 and warmup_steps 0; schedule 'linear' needs total_steps >"
                " warmup_steps"
            ),
        ),
        (
            {"schedule": "cosine", "warmup_steps": 9, "total_steps": 9},
            "total_steps is 9 and warmup_steps 9; schedule 'cosine'",
        ),
        ({"learning_rate": -1e-3}, "learning_rate is -0.001; expected a finite number >= 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"learning_rate": math.inf}, "learning_rate is inf"),
    ],
)
def test_optimizer_configs_that_cannot_run_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**fields)


def test_an_empty_state_has_room_for_all_policies_and_their_targets():
    configs = [
        AdapterConfig(3, targets=("q",)),
        AdapterConfig(1, targets=("k",)),
        AdapterConfig(4, targets=("k",)),
    ]
    state = state_lib.empty(SPECS, configs)
    assert list(state) == [1, 4]
    assert {path for path, _ in params_lib.leaves_with_path(state[1].adapters.factors)} == {
        "dense/attn/k/a",
        "dense/attn/k/b",
    }
    assert state[4].adapters.factors["dense"]["attn"]["q"]["a"].shape == (2, 2, 4, 5)
    assert state[4].adapters.factors["dense"]["attn"]["k"]["b"].shape == (2, 2, 4, 4)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state))
    assert all(2 in leaf.shape[:2] for leaf in jax.tree.leaves(state[4])), (
        "every leaf has a slot axis"
    )
    assert state_lib.empty(SPECS, configs, {1: 5, 4: 7})[4].steps.shape == (7,)


def test_a_policy_costs_four_times_its_factors_and_a_few_numbers():
    """Factors, two moments and the gradient sum: 4 copies of float32."""
    config = AdapterConfig(4, targets=("q", "k"))
    factors = tree.adapter_nbytes(SPECS, config)
    for slots in (1, 6):
        got = params_lib.nbytes(state_lib.empty(SPECS, [config], {4: slots})) / slots
        assert 4 * factors < got < 4 * factors + 200
