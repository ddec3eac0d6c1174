"""Work in a process of its own, whose memory is then its own too."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def alone(function: Callable[..., T], *arguments: object) -> T:
    """What a function returns in a fresh process.

    Raises:
        BrokenProcessPool: the process died; a ``multiprocessing.Pool`` would wait for it for ever.
        Whatever the function raises.
    """
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return pool.submit(function, *arguments).result()
