"""Names of pods, their devices, and what is said when one cannot be had."""

import importlib.util

import jax
import pytest

from mint_jax.aot import chips
from mint_jax.errors import UserError


@pytest.mark.parametrize(
    ("cloud", "ours"),
    [
        ("v4-8", "v4:2x2x1"),  # TensorCores
        ("v5litepod-16", "v5e:4x4"),  # chips
        ("tpu7x-4x4x4", "tpu7x:4x4x4"),
        ("v5p:4x4x8", "v5p:4x4x8"),
        ("cuda:h200x8", "cuda:h200x8"),
    ],
)
def test_names_of_clouds(cloud, ours):
    assert chips.canonical(cloud) == ours
    with pytest.raises(UserError, match="topology is 'v5p-60'; choose one of: v5p-8, v5p-16, "):
        chips.canonical("v5p-60")


@pytest.mark.parametrize(
    ("name", "per_chip"), [("v5e:2x2", 1), ("tpu7x:2x2x1", 2), ("v5p:2x2x1", 1)]
)
def test_a_chip_may_show_as_two_devices(name, per_chip):
    target = chips.target(name)
    chip = chips.CHIPS[name.split(":")[0]]
    assert (target.chips, len(target.devices)) == (4, 4 * per_chip)
    assert (target.hbm * per_chip, target.flops * per_chip) == (chip.hbm, chip.flops)
    assert (target.hbm_rate * per_chip, target.link_rate * per_chip) == (
        chip.hbm_rate,
        chip.link_rate,
    )
    assert jax.default_backend() == "cpu"


def test_a_missing_compiler_names_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e \.\[tpu-aot\]"):
        chips.target("v5e:2x2")
    with pytest.raises(
        UserError, match=r"'cuda:h200x8' needs the CUDA compiler, .*pip install -e \.\[cuda\]"
    ):
        chips.target("cuda:h200x8")
