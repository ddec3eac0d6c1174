"""Trees of ParamSpec: shapes, sizes, paths and initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.mesh import make_mesh
from mint_jax.models import transformer
from mint_jax.models.config import read_config
from mint_jax.params import ParamSpec
from mint_jax.sharding import shardings
from tests import oracles

SPECS = {
    "dense": {
        "q": {
            "w": ParamSpec((3, 32, 48), ("layers", "embed", "q_heads")),
            "b": ParamSpec((3, 48), ("layers", None), init="zeros"),
        }
    },
    "embed": {"w": ParamSpec((64, 32), ("vocab", "embed"), jnp.bfloat16, fan_in=16)},
    "norm": ParamSpec((32,), ("norm",), init="ones"),
}


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


def test_paths_go_there_and_back():
    flat = dict(params_lib.leaves_with_path(SPECS))
    assert list(flat) == ["dense/q/w", "dense/q/b", "embed/w", "norm"]
    assert params_lib.nest(flat) == SPECS
    assert params_lib.map_with_path(lambda path, spec: (path, spec.shape), SPECS)["dense"]["q"][
        "b"
    ] == ("dense/q/b", (3, 48))


def test_initial_values_have_the_asked_scale_dtype_and_constants(rng):
    tree = params_lib.init(SPECS, jax.random.key(int(rng.integers(2**31))))
    w, table = np.asarray(tree["dense"]["q"]["w"]), np.asarray(tree["embed"]["w"], np.float32)
    # the standard error of a normal sample's deviation is 1 / sqrt(2 n): 1% and 1.6% here; five of
    # them
    assert w.std() == pytest.approx(32**-0.5, rel=5 * (2 * w.size) ** -0.5)
    assert table.std() == pytest.approx(16**-0.5, rel=5 * (2 * table.size) ** -0.5 + 2**-8)
    assert abs(w.mean()) < 5 * 32**-0.5 * w.size**-0.5
    assert len(np.unique(w)) > 0.99 * w.size
    assert tree["embed"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(tree["dense"]["q"]["b"], np.zeros((3, 48)))
    np.testing.assert_array_equal(tree["norm"], np.ones(32))


def test_a_leafs_values_depend_on_key_and_path_alone():
    spec = ParamSpec((4, 8), (None, None))
    one, key = params_lib.init({"a": spec, "b": spec}, jax.random.key(1)), jax.random.key(1)
    more = params_lib.init({"new": spec, "b": spec, "sub": {"a": spec}, "a": spec}, key)
    for name in "ab":
        np.testing.assert_array_equal(one[name], more[name])
    others = (
        more["b"],
        more["sub"]["a"],
        more["new"],
        params_lib.init({"a": spec}, jax.random.key(2))["a"],
    )
    assert all(np.abs(one["a"] - other).min() > 0 for other in others)


def test_path_seeds_are_the_same_in_every_process_and_differ_between_paths(hf_dirs):
    assert params_lib.path_seed("ab") == ((97 * 1000003) ^ 98) & 0x7FFFFFFF
    paths = [
        path
        for path, _ in params_lib.leaves_with_path(
            transformer.abstract(read_config(hf_dirs("llama_bias")))
        )
    ]
    assert len({params_lib.path_seed(path) for path in paths}) == len(paths)


def test_abstract_trees_carry_shape_dtype_and_sharding():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    plain, placed = params_lib.abstract(SPECS), params_lib.abstract(SPECS, shardings(SPECS, mesh))
    for tree in (plain, placed):
        leaf = tree["embed"]["w"]
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert (leaf.shape, leaf.dtype) == ((64, 32), jnp.bfloat16)
    assert plain["embed"]["w"].sharding is None
    assert placed["embed"]["w"].sharding.shard_shape((64, 32)) == (32, 16)
