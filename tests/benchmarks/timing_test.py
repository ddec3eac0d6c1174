"""Intervals cover the truth as often as they claim, and runs merge into figures."""

import math

import numpy as np
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


def test_a_ratio_is_of_medians_and_its_interval_is_paired(rng):
    spell = np.exp(rng.normal(size=9))  # of the machine: it slows both sides of a round
    times = {"slow": (3 * spell).tolist(), "fast": spell.tolist()}
    assert timing.ratio(times, "slow", "fast") == {"median": 3.0, "interval": [3.0, 3.0], "n": 9}
    assert timing.ratio(times, "slow", "fast", less=1)["median"] == 2.0
    noisy = {"slow": [3.0, 2.0, 9.0], "fast": [1.0, 1.5, 1.2]}
    figure = timing.ratio(noisy, "slow", "fast")
    assert figure["median"] == pytest.approx(3.0 / 1.2, rel=1e-4)
    low, high = figure["interval"]
    assert low < figure["median"] < high
