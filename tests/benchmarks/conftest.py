"""Benchmarks and the jobs they start here run on one device."""

import jax
import pytest

from mint_jax import mesh


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    made = mesh.make_mesh
    monkeypatch.setattr(
        mesh,
        "make_mesh",
        lambda sizes=None, devices=None: made(sizes, devices or jax.devices()[:1]),
    )
