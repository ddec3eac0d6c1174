"""The measure of memory sees what a call takes, also where it is free again at its end."""

import threading
import time

import pytest

from tests.memory import SLACK, assert_takes_at_most


def test_memory_beyond_the_limit_fails():
    with pytest.raises(AssertionError, match="bytes were taken"):
        assert_takes_at_most(1 << 20, lambda: bytearray(5 * SLACK))


def test_memory_that_was_free_before_counts():
    def blocks():
        return [bytes(1 << 10) for _ in range(64 << 10)]

    blocks()
    with pytest.raises(AssertionError, match="bytes were taken"):
        assert_takes_at_most(1 << 20, blocks)


def test_memory_of_another_thread_does_not_count():
    def other():
        kept = []
        for _ in range(10):
            kept.append(bytearray(16 << 20))
            time.sleep(0.05)

    thread = threading.Thread(target=other)
    thread.start()
    assert_takes_at_most(0, lambda: time.sleep(0.1))
    thread.join()
