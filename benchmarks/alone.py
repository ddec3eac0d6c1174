"""Runs a function in a fresh process, whose memory is then its own."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def alone(function: Callable[..., T], *arguments: object) -> T:
    """Returns the result of a function in a fresh process.

    Raises:
        BrokenProcessPool: the process died; a ``multiprocessing.Pool`` would wait without end.
        Whatever the function raises.
    """
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return pool.submit(function, *arguments).result()
