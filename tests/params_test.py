"""Trees of ParamSpec: shapes, sizes, paths and initial values."""

import jax
import numpy as np

from mint_jax import params as params_lib
from mint_jax.params import ParamSpec


def test_a_leafs_values_depend_on_key_and_path_alone():
    spec = ParamSpec((4, 8), (None, None))
    one, key = params_lib.init({"a": spec, "b": spec}, jax.random.key(1)), jax.random.key(1)
    more = params_lib.init({"new": spec, "b": spec, "sub": {"a": spec}, "a": spec}, key)
    for name in "ab":
        np.testing.assert_array_equal(one[name], more[name])
    other = params_lib.init({"a": spec}, jax.random.key(2))["a"]
    others = (more["b"], more["sub"]["a"], more["new"], other)
    assert all(np.abs(one["a"] - other).min() > 0 for other in others)
