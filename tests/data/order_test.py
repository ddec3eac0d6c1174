"""Epochs are permutations, and a step's examples depend on its number alone."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.data.order import epoch_indices


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**63))
def test_every_epoch_is_a_permutation(examples, per_step, seed):
    count = 3 * examples // per_step + 1
    steps = [epoch_indices(examples, per_step, seed, step) for step in range(count)]
    assert all(len(indices) == per_step for indices in steps)
    walked = list(itertools.chain(*steps))
    for epoch in range(len(walked) // examples):
        assert sorted(walked[epoch * examples : (epoch + 1) * examples]) == list(range(examples))
    one_by_one = [epoch_indices(examples, 1, seed, i) for i in range(len(walked))]
    assert one_by_one == [[i] for i in walked]
