"""A fresh process for a function, and a fresh folder for a bench."""

import concurrent.futures
import contextlib
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def alone(function: Callable[..., T], *arguments: object) -> T:
    """Returns the result of a function in a fresh process."""
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return pool.submit(function, *arguments).result()


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yields an empty folder, and removes it afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
