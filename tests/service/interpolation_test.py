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


def adapter(rng, specs, config: AdapterConfig):
    wanted = lora_tree.adapter_specs(specs, config)
    return params_lib.map_with_path(
        lambda _, spec: rng.normal(size=spec.shape).astype(np.float32), wanted
    )


def deltas(adapter, config: AdapterConfig) -> dict[str, np.ndarray]:
    """Dense ones by path, ``[.., D, F]``."""
    flat = {path: np.float64(leaf) for path, leaf in params_lib.leaves_with_path(adapter)}
    return {
        path[:-2]: config.scale * np.swapaxes(a, -1, -2) @ flat[path[:-1] + "b"]
        for path, a in flat.items()
        if path.endswith("/a")
    }


def summed(sources, coefficients) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for coefficient, (tree, config) in zip(coefficients, sources, strict=True):
        for path, delta in deltas(tree, config).items():
            out[path] = out.get(path, 0) + coefficient * delta
    return out


@pytest.fixture(params=["llama", "qwen3_moe"])
def specs(request, tiny_base):
    return transformer.abstract(tiny_base(request.param).cfg)


@pytest.fixture
def sources(rng, specs):
    return [(adapter(rng, specs, config), config) for config in CONFIGS]


@pytest.mark.parametrize("rank", [6, 8])
def test_a_sum_that_fits_is_exact(specs, sources, rank):
    made = interpolate(sources, COEFFICIENTS, specs, rank)
    lora_tree.check_fits(params_lib.nest(made.factors), made.config, specs, "the sum")
    assert (made.config.rank, made.config.scale, made.error) == (rank, 1.0, 0.0)
    assert set(made.config.targets) == {"q", "down", "embed", "up"}
    found, wanted = (
        deltas(params_lib.nest(made.factors), made.config),
        summed(sources, COEFFICIENTS),
    )
    assert found.keys() == wanted.keys()
    for path, delta in wanted.items():
        # factors are rounded to float32
        np.testing.assert_allclose(found[path], delta, rtol=1e-5, atol=1e-5)


def test_a_smaller_rank_has_the_nearest_deltas_and_tells_what_it_left_out(specs, sources):
    made = interpolate(sources, COEFFICIENTS, specs, 4)
    lora_tree.check_fits(params_lib.nest(made.factors), made.config, specs, "the sum")
    assert made.config.rank == 4
    found, wanted = (
        deltas(params_lib.nest(made.factors), made.config),
        summed(sources, COEFFICIENTS),
    )
    for path, delta in wanted.items():
        u, values, v = np.linalg.svd(delta, full_matrices=False)
        nearest = (u[..., :4] * values[..., None, :4]) @ v[..., :4, :]
        np.testing.assert_allclose(found[path], nearest, rtol=1e-4, atol=1e-4 * np.abs(delta).max())
    left_out = sum(((found[path] - delta) ** 2).sum() for path, delta in wanted.items())
    assert made.error == pytest.approx(
        np.sqrt(left_out / sum((delta**2).sum() for delta in wanted.values())), rel=1e-4
    )
    assert made.error > 0.01


def test_a_sum_beyond_float32_is_refused(specs, rng):
    with pytest.raises(UserError, match="beyond float32"):
        interpolate([(adapter(rng, specs, CONFIGS[0]), CONFIGS[0])], [3e38], specs, 2)
