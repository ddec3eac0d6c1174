"""Epochs are permutations, and a step's examples depend on its number alone."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.data.order import epoch_indices


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**63))
def test_every_epoch_is_a_permutation(examples, per_step, seed):
    steps = [
        epoch_indices(examples, per_step, seed, step)
        for step in range(3 * examples // per_step + 1)
    ]
    assert all(len(indices) == per_step for indices in steps)
    walked = list(itertools.chain(*steps))
    for epoch in range(len(walked) // examples):
        assert sorted(walked[epoch * examples : (epoch + 1) * examples]) == list(range(examples))
    assert [epoch_indices(examples, 1, seed, i) for i in range(len(walked))] == [
        [i] for i in walked
    ]


def test_epochs_and_seeds_differ():
    orders = [
        tuple(epoch_indices(200, 200, seed, epoch)) for seed in range(3) for epoch in range(3)
    ]
    assert len(set(orders)) == 9
    assert tuple(range(200)) not in orders


def test_a_step_does_not_depend_on_those_before_it():
    late = epoch_indices(17, 5, 3, 1000)
    for step in range(200):  # more epochs than are remembered
        epoch_indices(17, 17, 3, step)
    assert epoch_indices(17, 5, 3, 1000) == late
    assert all(type(i) is int for i in late)
