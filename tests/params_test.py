"""Trees of ParamSpec: shapes, sizes, paths and initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.models import transformer
from mint_jax.models.config import read_config
from mint_jax.params import ParamSpec
from tests import oracles


@pytest.mark.parametrize("name", oracles.TINY)
def test_an_abstract_base_has_as_many_parameters_as_under_torch(name, hf_dirs):
    model = oracles.torch_model(hf_dirs(name))
    specs = transformer.abstract(read_config(hf_dirs(name)), jnp.bfloat16)
    # float32, no parameter there
    biases = sum(
        b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")
    )
    assert params_lib.count(specs) - biases == sum(p.numel() for p in model.parameters())
    assert params_lib.nbytes(specs) - 4 * biases == sum(
        p.numel() * 2 for p in model.to(torch.bfloat16).parameters()
    )


def test_a_leafs_values_depend_on_key_and_path_alone():
    spec = ParamSpec((4, 8), (None, None))
    one, key = params_lib.init({"a": spec, "b": spec}, jax.random.key(1)), jax.random.key(1)
    more = params_lib.init({"new": spec, "b": spec, "sub": {"a": spec}, "a": spec}, key)
    for name in "ab":
        np.testing.assert_array_equal(one[name], more[name])
    other = params_lib.init({"a": spec}, jax.random.key(2))["a"]
    others = (more["b"], more["sub"]["a"], more["new"], other)
    assert all(np.abs(one["a"] - other).min() > 0 for other in others)
