"""The measure of memory sees what a call takes, also where it is free again at its end."""

import threading

import pytest

from tests.memory import SLACK, assert_takes_at_most


def test_memory_within_the_limit_passes():
    assert_takes_at_most(8 << 20, lambda: bytearray(8 << 20))


@pytest.mark.parametrize("size", [2 * SLACK, 8 * SLACK])
def test_memory_beyond_the_limit_fails(size):
    with pytest.raises(AssertionError, match="bytes were taken"):
        assert_takes_at_most(1 << 20, lambda: bytearray(size + (1 << 20)))


def test_memory_that_was_free_before_counts():
    def blocks():
        return [bytes(1 << 10) for _ in range(64 << 10)]

    blocks()
    with pytest.raises(AssertionError, match="bytes were taken"):
        assert_takes_at_most(1 << 20, blocks)


def test_memory_of_another_thread_does_not_count():
    ended = threading.Event()

    def other():
        while not ended.is_set():
            bytearray(64 << 20)

    thread = threading.Thread(target=other)
    thread.start()
    assert_takes_at_most(0, lambda: sum(range(1 << 20)))
    ended.set()
    thread.join()


def test_an_error_of_the_call_is_told():
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        assert_takes_at_most(0, lambda: 1 // 0)
