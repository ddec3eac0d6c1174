"""The measure of memory sees what a block takes, also where it is free again at its end."""

import pytest

from tests.memory import SLACK, taken_at_most


def test_memory_within_the_limit_passes():
    with taken_at_most(8 << 20):
        bytearray(8 << 20)


@pytest.mark.parametrize("size", [SLACK, 4 * SLACK])
def test_memory_beyond_the_limit_fails(size):
    with pytest.raises(AssertionError, match="bytes were taken"), taken_at_most(1 << 20):
        bytearray(size + (1 << 20))


def test_memory_that_was_free_before_counts():
    kept = [bytes(1 << 10) for _ in range(64 << 10)]
    del kept
    with pytest.raises(AssertionError, match="bytes were taken"), taken_at_most(1 << 20):
        kept = [bytes(1 << 10) for _ in range(64 << 10)]
    del kept
