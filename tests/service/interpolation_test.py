"""Sums of adapters against sums of their dense deltas."""

import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.service.interpolation import interpolate

CONFIGS = [
    AdapterConfig(2, 4.0, ("q", "down", "embed")),
    AdapterConfig(3, 5.0, ("q", "up"), rslora=True),
    AdapterConfig(1, 1.0, ("down",)),
]
COEFFICIENTS = [0.7, -1.5, 0.25]


def deltas(adapter, config: AdapterConfig) -> dict[str, np.ndarray]:
    """Dense ones by path, ``[.., D, F]``."""
    flat = {path: np.float64(leaf) for path, leaf in params_lib.leaves_with_path(adapter)}
    return {
        path[:-2]: config.scale * np.swapaxes(a, -1, -2) @ flat[path[:-1] + "b"]
        for path, a in flat.items()
        if path.endswith("/a")
    }


@pytest.fixture(params=["llama", "qwen3_moe"])
def specs(request, tiny_base):
    return transformer.abstract(tiny_base(request.param).cfg)


@pytest.fixture
def sources(rng, specs):
    def draw(_, spec):
        return rng.normal(size=spec.shape).astype(np.float32)

    wanted = [lora_tree.adapter_specs(specs, config) for config in CONFIGS]
    return [(params_lib.map_with_path(draw, one), config) for one, config in zip(wanted, CONFIGS)]


@pytest.mark.parametrize("rank", [4, 6, 8])
def test_a_sum_is_exact_if_it_fits_and_else_the_nearest(specs, sources, rank):
    made = interpolate(sources, COEFFICIENTS, specs, rank)
    lora_tree.check_fits(params_lib.nest(made.factors), made.config, specs, "the sum")
    assert (made.config.rank, made.config.scale) == (rank, 1.0)
    assert set(made.config.targets) == {"q", "down", "embed", "up"}
    found, wanted = deltas(params_lib.nest(made.factors), made.config), {}
    for coefficient, (adapter, config) in zip(COEFFICIENTS, sources):
        for path, delta in deltas(adapter, config).items():
            wanted[path] = wanted.get(path, 0) + coefficient * delta
    assert found.keys() == wanted.keys()
    omitted = 0.0
    for path, delta in wanted.items():
        u, values, v = np.linalg.svd(delta, full_matrices=False)
        nearest = (u[..., :rank] * values[..., None, :rank]) @ v[..., :rank, :]
        omitted += (values[..., rank:] ** 2).sum()
        # factors are rounded to float32
        np.testing.assert_allclose(found[path], nearest, rtol=1e-4, atol=1e-4 * np.abs(delta).max())
    error = np.sqrt(omitted / sum((delta**2).sum() for delta in wanted.values()))
    assert made.error == (0.0 if rank >= 6 else pytest.approx(error, rel=1e-4))
    assert (made.error > 0.01) == (rank < 6)


def test_a_sum_beyond_float32_is_refused(specs, sources):
    with pytest.raises(UserError, match="beyond float32"):
        interpolate(sources[:1], [3e38], specs, 2)
