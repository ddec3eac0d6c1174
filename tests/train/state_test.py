"""Training state: optimizer configs, and slots that start, hold and pay for one policy each."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
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


def filled(rng, configs, slots=None):
    """A state whose every array is random, so that whatever is written shows."""
    state = state_lib.empty(SPECS, configs, slots)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) * 100).astype(x.dtype), state
    )


def slot_of(stack, slot):
    return jax.tree.map(lambda x: np.asarray(x[slot] if x.ndim == 1 else x[:, slot]), stack)


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


def test_starting_a_policy_resets_its_slot_and_leaves_the_others_bit_identical(rng):
    config, opt = (
        AdapterConfig(3, 6.0, ("q",)),
        OptimizerConfig(2e-3, 0.8, 0.95, 1e-6, 0.1, 0.0, 3, 10, "cosine", 0.2),
    )
    state = filled(
        rng, [AdapterConfig(4, targets=("q", "k"))] * 3 + [AdapterConfig(1, targets=("q",))]
    )
    adapter = jax.tree.map(
        lambda s: rng.normal(size=s.shape).astype(np.float32), tree.adapter_specs(SPECS, config)
    )
    after = jax.jit(state_lib.start)(state[4], 1, adapter, config.scale, state_lib.Hyper.of(opt))
    for slot in (0, 2):
        chex.assert_trees_all_equal(slot_of(after, slot), slot_of(state[4], slot))
    mine = slot_of(after, 1)
    q = mine.adapters.factors["dense"]["attn"]["q"]
    for name in ("a", "b"):
        np.testing.assert_array_equal(q[name][:, :3], adapter["dense"]["attn"]["q"][name])
        assert not np.any(q[name][:, 3:])
        assert not np.any(mine.adapters.factors["dense"]["attn"]["k"][name])
    assert mine.adapters.scale == 2.0
    assert not any(
        np.any(leaf)
        for leaf in jax.tree.leaves((mine.opt, mine.grad_sum, mine.steps, mine.skipped))
    )
    # 0 switches clipping off
    expected = dataclasses.asdict(opt) | {"schedule": 2, "max_grad_norm": np.inf}
    for name, value in expected.items():
        assert getattr(mine.hyper, name) == np.float32(value), name


def test_a_policy_costs_four_times_its_factors_and_a_few_numbers():
    """Factors, two moments and the gradient sum: 4 copies of float32."""
    config = AdapterConfig(4, targets=("q", "k"))
    factors = tree.adapter_nbytes(SPECS, config)
    for slots in (1, 6):
        got = params_lib.nbytes(state_lib.empty(SPECS, [config], {4: slots})) / slots
        assert 4 * factors < got < 4 * factors + 200
