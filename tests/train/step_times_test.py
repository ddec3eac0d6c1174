"""What shapes are chosen by: one slow moment decides nothing, and no shape is given up for good."""

import pytest

from mint_jax.train.blocks import BlockShape
from mint_jax.train.step_times import KEPT, STALE_S, StepTimes

SMALL, LARGE = BlockShape(1, 1, 32), BlockShape(1, 1, 256)


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def times(now):
    return StepTimes(lambda: now[0])


@pytest.mark.parametrize("slow", range(3))
def test_one_slow_moment_decides_nothing(times, slow):
    """The first call of a process, in memory that it has not touched, or any other."""
    for k in range(3):
        times.add(LARGE, True, 9.0 if k == slow else 0.5 + k / 100)
    assert times.seconds(LARGE, True) <= 0.52
    assert [(s, b) for s, b, _ in times] == [(LARGE, True)]


def test_a_shape_that_was_slow_is_tried_again_when_others_show_that_it_need_not_be(times, now):
    for _ in range(KEPT):
        times.add(LARGE, True, 5.0)
        times.add(SMALL, True, 1.0)
    now[0] = STALE_S / 2
    times.add(SMALL, False, 0.01)  # says nothing about backward passes
    assert times.seconds(LARGE, True) == 5.0
    now[0] = STALE_S + 1
    assert times.seconds(LARGE, True) == 5.0, "nothing else was measured since"
    for _ in range(KEPT):
        times.add(SMALL, True, 0.02)
    assert times.seconds(LARGE, True) == pytest.approx(0.02 * 256 / 32)
    times.add(LARGE, True, 5.0)
    assert times.seconds(LARGE, True) == 5.0, (
        "it is slow all the same, and is left alone for as long again"
    )
