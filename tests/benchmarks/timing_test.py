"""Intervals cover the truth as often as they claim, and runs merge into figures."""

import math

import pytest

from benchmarks import timing


@pytest.mark.parametrize(("n", "q"), [(5, 50), (7, 50), (200, 50), (2000, 99)])
def test_intervals_of_quantiles_cover_the_truth(n, q, rng):
    covered = 0
    for _ in range(400):
        figure = timing.percentile(rng.exponential(size=n), q)
        low, high = figure["interval"]
        assert low <= figure["percentile"] <= high
        covered += low <= -math.log(1 - q / 100) <= high
    assert covered / 400 > 0.90  # 95 % but for n = 5 (94 %), less three deviations of 400 draws
