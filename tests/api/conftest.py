"""A random base as a notebook loads it."""

import pytest

import mint_jax as mint
from mint_jax import mesh
from mint_jax.train.config import registered


@pytest.fixture
def load():
    return lambda **settings: mint.load("tiny-random", mesh=mesh.single_device_mesh(), **settings)


@pytest.fixture(scope="module")
def model():
    with mint.load("tiny-random", mesh=mesh.single_device_mesh()) as model:
        yield model


@pytest.fixture(autouse=True)
def own_losses():
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)
