"""Which cases of a test belong to ``make test`` and which, for their time, to ``make
test-long``.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

_LONG = Path(__file__).with_name("long_cases.txt")


def first(n: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, those behind the first ``n`` marked long."""
    return [
        case if i < n else pytest.param(case, marks=pytest.mark.long)
        for i, case in enumerate(cases)
    ]


def has_value(item: pytest.Item, value: str) -> bool:
    """Whether one of a test's parameters is this value."""
    call = getattr(item, "callspec", None)
    return call is not None and value in map(str, call.params.values())


def mark_long_cases(items: Sequence[pytest.Item], whole_files: bool) -> None:
    """Marks those of ``long_cases.txt`` long.

    Args:
        whole_files: the items are all tests of their files, so a line about one of these files must
            name one of them.

    Raises:
        UsageError: it names none.
    """
    lines = [
        line.split("  #")[0].strip()
        for line in _LONG.read_text().splitlines()
        if not line.startswith("#")
    ]
    ids = {
        item: item.path.relative_to(_LONG.parent).as_posix() + "::" + item.name for item in items
    }
    named = set()
    for item, one in ids.items():
        for line in lines:
            if one == line or one.startswith(line if "[" in line else line + "["):
                item.add_marker(pytest.mark.long)
                named.add(line)
    files = {one.split("::")[0] for one in ids.values()}
    if whole_files and (
        stale := [line for line in lines if line not in named and line.split("::")[0] in files]
    ):
        raise pytest.UsageError(
            f"{_LONG.name} names tests that are not there: {'; '.join(stale)}: correct these lines"
        )
