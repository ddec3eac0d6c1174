"""Which kernels `make test` interprets: all of XLA's forms and of TPUs, and of GPUs one case of
each op.
"""

import pytest

from tests.marks import has_value


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        if "pallas_kernels" in item.path.parts and has_value(item, "pallas_gpu"):
            if item.path in seen:
                item.add_marker(pytest.mark.long)
            seen.add(item.path)
