"""Counts of the compiler's static schedule of real kernels are those that shapes imply."""

import pytest

from benchmarks import launch
from mint_jax.errors import UserError


@pytest.mark.long
def test_counts_of_real_kernels_are_what_shapes_say(tmp_path):
    config = launch.load("configs/bench/schedule.py:ci")
    try:
        result = launch.run(config, tmp_path)
    except UserError as reason:
        pytest.skip(str(reason))  # no compiler, or one that does not know the undocumented flags
    chip = result["chips"]["v5e:2x2"]
    # An instruction of v5e multiplies 16 rows by a square of 128. Backward all products are of both
    # projections: first ones, one of the rows' gradient, outer ones, whose rows are the columns of
    # the first.
    base, add = chip["base"], chip["add"]
    assert base["vmatmul"] == 2 * (2048 // 128) * (768 // 128) * 128 // 16
    for n, squares in (("1", 16), ("4", 16), ("8", 32)):
        products = squares + 2 * 6
        assert add[n]["vmatmul"] == products * 128 // 16
        assert add[n]["lanes_over_base"] == pytest.approx(products / (2 * 96), abs=1e-4)
        assert chip["one_pass"][n]["vmatmul"] == base["vmatmul"] + products * 128 // 16
        assert chip["one_pass"][n]["bundles"] <= 1.01 * (base["bundles"] + add[n]["bundles"]), (
            "one pass is the default, for the bytes that it saves"
        )
    an_adapter = add["2"]["bundles"] - add["1"]["bundles"]
    assert add["4"]["bundles"] == add["1"]["bundles"] + 3 * an_adapter
    assert an_adapter >= 8, "four copies are started and waited for"
    assert add["4"]["bundles"] > add["4"]["lanes_over_base"] * base["bundles"]
    assert add["4"]["over_base"] <= 0.3, "a kernel that costs more than it did"
    for n, chunk in ((1, 1), (8, 2)):  # in 128 columns
        squares = chunk * 16 + 2 * 6 + chunk * 16
        backward = chip["backward"][str(n)]
        assert backward["vmatmul"] == (squares + chunk * (16 + 6)) * 128 // 16
        assert add["1"]["bundles"] < backward["bundles"]
        assert backward["over_base"] < 0.8, "a kernel that costs more than it did"
