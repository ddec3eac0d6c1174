"""What every job does first: seeds by name."""

import pytest

from mint_jax.errors import UserError
from mint_jax.harness.start import policy_seed


def test_a_policy_s_seed_is_of_its_name_and_the_run_s_seed_alone():
    names = ["a", "b", "ab", "policy", "étude"]
    seeds = {(run, name): policy_seed(run, name) for run in (0, 1, 2**40) for name in names}
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= s < 2**32 for s in seeds.values())
    assert seeds[0, "a"] == 788905869  # the same on every machine and in every release
    with pytest.raises(UserError, match="seed is -1; expected a whole number >= 0"):
        policy_seed(-1, "a")
