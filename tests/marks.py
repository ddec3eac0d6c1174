"""Which cases of a test belong to ``make test`` and which, for their time, to ``make test-long``."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(n: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, those behind the first ``n`` marked long."""
    return [case if i < n else pytest.param(case, marks=pytest.mark.long) for i, case in enumerate(cases)]


def has_value(item: pytest.Item, value: str) -> bool:
    """Whether one of a test's parameters is this value."""
    call = getattr(item, "callspec", None)
    return call is not None and value in map(str, call.params.values())
