"""Recipes take every device there is; here they run on one."""

import pytest


@pytest.fixture(autouse=True)
def on_one_device(one_device): ...
