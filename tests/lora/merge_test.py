"""Merges of adapters: sums against dense float64 deltas, TIES and DARE against PEFT's functions of
the same deltas, of dense projections and of experts.
"""

import dataclasses
import zlib

import numpy as np
import pytest
import torch
from peft.utils import merge_utils

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.merge import MergeConfig, merge
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from tests.adapters import biased_targets

CONFIGS = [
    AdapterConfig(2, 4.0, ("q", "down", "embed")),
    AdapterConfig(3, 5.0, ("q", "up"), rslora=True),
    AdapterConfig(1, 1.0, ("down",)),
]
WEIGHTS = [0.7, -1.5, 0.25]


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


def draw(rng, specs, config: AdapterConfig):
    def one(_, spec):
        return rng.normal(size=spec.shape).astype(np.float32)

    return params_lib.map_with_path(one, lora_tree.adapter_specs(specs, config)), config


@pytest.fixture
def members(rng, specs):
    return [draw(rng, specs, config) for config in CONFIGS]


def nearest(delta: np.ndarray, rank: int) -> np.ndarray:
    u, values, v = np.linalg.svd(delta, full_matrices=False)
    return (u[..., :rank] * values[..., None, :rank]) @ v[..., :rank, :]


@pytest.mark.parametrize("rank", [4, 6, 8])
def test_a_sum_is_exact_if_it_fits_and_else_the_nearest(specs, members, rank):
    made = merge(members, WEIGHTS, MergeConfig(rank=rank))
    lora_tree.check_fits(made.adapter, made.config, specs, "the sum")
    assert (made.config.rank, made.config.scale) == (rank, 1.0)
    assert set(made.config.targets) == {"q", "down", "embed", "up"}
    found, wanted = deltas(made.adapter, made.config), {}
    for weight, member in zip(WEIGHTS, members):
        for path, delta in deltas(*member).items():
            wanted[path] = wanted.get(path, 0) + weight * delta
    assert found.keys() == wanted.keys()
    # factors are rounded to float32
    for path, delta in wanted.items():
        atol = 1e-4 * np.abs(delta).max()
        np.testing.assert_allclose(found[path], nearest(delta, rank), rtol=1e-4, atol=atol)
    omitted = sum(((delta - nearest(delta, rank)) ** 2).sum() for delta in wanted.values())
    error = np.sqrt(omitted / sum((delta**2).sum() for delta in wanted.values()))
    assert made.error == (0.0 if rank >= 6 else pytest.approx(error, rel=1e-4))
    assert (made.error > 0.01) == (rank < 6)


PEFT = {
    "ties": merge_utils.ties,
    "dare": merge_utils.dare_linear,
    "dare_ties": merge_utils.dare_ties,
}


def entries(path: str, at: tuple[int, ...], member: int, shape, density: float) -> torch.Tensor:
    """1 where the seed 7 keeps an entry of a delta."""
    seed = [7, zlib.crc32(path.encode()), *at, member]
    return torch.tensor(np.random.default_rng(seed).random(shape) < density).double()


@pytest.mark.parametrize("method", PEFT)
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_ties_and_dare_are_pefts(specs, members, monkeypatch, method, density):
    """PEFT's own random choice is replaced by that of our seed."""
    made = merge(members, WEIGHTS, MergeConfig(method, density, rank=16, seed=7))
    lora_tree.check_fits(made.adapter, made.config, specs, "the merge")
    found, dense = deltas(made.adapter, made.config), [deltas(*member) for member in members]
    total = omitted = 0.0
    for path, merged in found.items():
        here = [i for i, one in enumerate(dense) if path in one]
        weights = torch.tensor([WEIGHTS[i] for i in here], dtype=torch.float64)
        for at in np.ndindex(merged.shape[:-2]):
            masks = (entries(path, at, i, merged[at].shape, density) for i in here)
            monkeypatch.setattr(torch, "bernoulli", lambda input, masks=masks: next(masks))
            tensors = [torch.tensor(dense[i][path][at]) for i in here]
            wanted = PEFT[method](tensors, weights, density).numpy()
            part = nearest(wanted, 16)
            total, omitted = total + (wanted**2).sum(), omitted + ((wanted - part) ** 2).sum()
            np.testing.assert_allclose(merged[at], part, rtol=1e-4, atol=1e-4 * abs(part).max())
    # what keeps all entries is a sum, of rank 6
    assert made.error == pytest.approx(np.sqrt(omitted / total), rel=1e-4, abs=1e-7)
    assert (made.error > 0.01) == (method != "dare" or density < 1)


def test_dare_keeps_its_share_and_members_choose_apart(rng, specs):
    [member] = [draw(rng, specs, AdapterConfig(2, 2.0, ("up",)))]
    how = MergeConfig("dare", 0.25, 64)
    (one,), (other,) = (
        deltas(*merge([member] * 2, weights, dataclasses.replace(how, seed=seed))[:2]).values()
        for weights, seed in (((1, 0), 3), ((0, 1), 3))
    )
    [whole] = deltas(*member).values()
    atol = 1e-4 * np.abs(whole).max()
    kept = [np.abs(x) > atol for x in (one, other)]
    for mask, values in zip(kept, (one, other)):
        # six standard deviations of a binomial share
        assert abs(mask.mean() - 0.25) < 6 * (0.25 * 0.75 / mask.size) ** 0.5 + 1e-3
        np.testing.assert_allclose(values[mask], 4 * whole[mask], rtol=1e-3, atol=10 * atol)
    assert abs((kept[0] & kept[1]).mean() - 0.0625) < 6 * (0.0625 / whole.size) ** 0.5 + 1e-3


@pytest.mark.parametrize(
    ("method", "density"),
    [("sum", 1.0), *((method, density) for method in PEFT for density in (1e-9, 0.01, 0.5, 1.0))],
)
def test_biases_merge_entry_by_entry(rng, tiny_base, monkeypatch, method, density):
    """Down to a density at which nothing is kept."""
    specs = transformer.abstract(tiny_base().cfg)
    config = AdapterConfig(kind="bias", targets=biased_targets(specs))
    members = [draw(rng, specs, config) for _ in range(3)]
    made = merge(members, WEIGHTS, MergeConfig(method, density, seed=7))
    lora_tree.check_fits(made.adapter, made.config, specs, "the merge")
    assert (made.config.kind, made.error) == ("bias", 0.0)
    flat = [dict(params_lib.leaves_with_path(adapter)) for adapter, _ in members]
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    judge = PEFT.get(method, lambda tensors, weights, _: sum(map(torch.mul, weights, tensors)))
    for path, leaf in params_lib.leaves_with_path(made.adapter):
        owner = path.removesuffix("/bias")
        for at in range(len(leaf)):
            masks = (entries(owner, (at,), i, leaf[at].shape, density) for i in range(3))
            monkeypatch.setattr(torch, "bernoulli", lambda input, masks=masks: next(masks))
            wanted = judge(
                [torch.tensor(np.float64(one[path][at])) for one in flat], weights, density
            )
            np.testing.assert_allclose(leaf[at], wanted.numpy(), rtol=1e-6, atol=1e-6)
    if density == 1e-9:
        assert not any(leaf.any() for _, leaf in params_lib.leaves_with_path(made.adapter))


def test_experts_that_share_factors_are_summed_and_not_cut(rng, tiny_base):
    specs = transformer.abstract(tiny_base("qwen3_moe").cfg)
    config = AdapterConfig(2, 2.0, ("gate", "down"), experts="shared_outer")
    members = [draw(rng, specs, config) for _ in range(2)]
    made = merge(members, [0.5, 2.0], MergeConfig())
    lora_tree.check_fits(made.adapter, made.config, specs, "the sum")
    assert (made.config.experts, made.config.rank) == ("shared_outer", 4)
    leaves = [dict(params_lib.leaves_with_path(adapter)) for adapter, _ in members]
    flat = dict(params_lib.leaves_with_path(made.adapter))
    for path in (path for path in flat if path.endswith("/a")):
        name = path.removesuffix("a")
        form = "lrd,lerf->ledf" if flat[path].ndim == 3 else "lerd,lrf->ledf"
        form = form if "/experts/" in path else "...rd,...rf->...df"
        found = np.einsum(form, np.float64(flat[path]), np.float64(flat[f"{name}b"]))
        wanted = sum(
            w * np.einsum(form, np.float64(one[path]), np.float64(one[f"{name}b"]))
            for w, one in zip([0.5, 2.0], leaves)
        )
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    other = draw(rng, specs, AdapterConfig(2, 2.0, ("gate",)))
    for some, how in (
        (members, MergeConfig(rank=3)),
        (members, MergeConfig("ties")),
        ([members[0], other], MergeConfig()),
    ):
        with pytest.raises(UserError, match="experts share factors"):
            merge(some, [1.0, 1.0], how)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_cannot_be_merged_is_refused(rng, specs, members, bad):
    poor, config = draw(rng, specs, CONFIGS[0])
    poor = params_lib.map_with_path(lambda _, leaf: leaf * np.float32(bad), poor)
    bias = draw(rng, specs, AdapterConfig(kind="bias", targets=("q",)))
    for some, weights, how, message in (
        ([*members[:2], (poor, config)], WEIGHTS, MergeConfig(), "member 3 has NaN"),
        (members, [1.0, bad, 1.0], MergeConfig(), f"a weight is {bad}"),
        (members[:1], [3e38], MergeConfig(), "beyond float32"),
        (members, [1.0], MergeConfig(), "3 members and 1 weights"),
        ([], [], MergeConfig(), "0 members"),
        ([members[0], bias], [1.0, 1.0], MergeConfig(), "kinds bias and lora"),
        ([bias], [1.0], MergeConfig(rank=8), "biases have no rank"),
    ):
        with pytest.raises(UserError, match=message):
            merge(some, weights, how)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "slerp"}, "slerp"),
        ({"method": "ties", "density": 0.0}, "density is 0"),
        ({"method": "ties", "density": float("nan")}, "density is nan"),
        ({"density": 0.5}, "1 for a sum"),
        ({"rank": 1025}, "rank is 1025"),
        ({"rank": -1}, "rank"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        MergeConfig(**fields)
