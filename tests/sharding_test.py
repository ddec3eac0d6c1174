"""The table of logical axes: what it makes of specs and meshes, and what it refuses."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.mesh import make_mesh
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig

P = PartitionSpec


@pytest.mark.parametrize(
    ("sizes", "axes", "want"),
    [
        (
            {"data": 2, "fsdp": 2, "tensor": 2},
            ("batch", "tokens", "act_embed"),
            P(("data", "fsdp"), None, None),
        ),
        ({"fsdp": 8}, ("batch",), P("fsdp")),
        (
            {"data": 2, "fsdp": 2, "tensor": 2},
            ("layers", "embed", "q_heads"),
            P(None, "fsdp", "tensor"),
        ),
        (
            {"fsdp": 2, "expert": 4},
            ("experts", "expert_embed", "expert_ffw"),
            P(("fsdp", "expert"), None, None),
        ),
        ({"fsdp": 4, "tensor": 2}, ("vocab", "embed"), P("tensor", "fsdp")),
    ],
)
def test_logical_axes_become_mesh_axes(sizes, axes, want):
    assert sharding.partition(axes, make_mesh(sizes)) == want


def test_two_dimensions_on_one_mesh_axis_are_refused():
    mesh = make_mesh({"data": 4, "tensor": 2})
    with pytest.raises(
        ValueError,
        match=(
            r"\('q_heads', 'ffw'\) map mesh axis 'tensor' to two dimensions: change sharding.RULES"
        ),
    ):
        sharding.partition(("q_heads", "ffw"), mesh)
    assert sharding.partition(("q_heads", "ffw"), make_mesh({"data": 8})) == P(None, None)


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 4, "tensor": 2},
        {"data": 2, "fsdp": 2, "tensor": 2},
    ],
)
def test_a_base_is_split_over_fsdp_and_tensor_and_copied_over_data(sizes):
    cfg = ModelConfig(
        "llama",
        vocab_size=96,
        d_model=64,
        num_layers=2,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        d_ff=128,
    )
    specs, mesh = transformer.abstract(cfg), make_mesh(sizes)
    placed = dict(params_lib.leaves_with_path(sharding.shardings(specs, mesh)))
    ways = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    matrices = 0
    for path, spec in params_lib.leaves_with_path(specs):
        is_norm = path.endswith("norm")
        assert spec.size == np.prod(placed[path].shard_shape(spec.shape)) * (
            1 if is_norm else ways
        ), path
        matrices += not is_norm
    assert matrices == 9


@pytest.mark.parametrize(
    ("sizes", "heads", "want", "ways"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4, ("batch", "kv_heads"), 4),
        # heads that do not divide
        ({"data": 2, "fsdp": 2, "tensor": 2}, 3, ("cache_rows", None), 8),
        ({"data": 2, "fsdp": 2, "tensor": 2}, None, ("cache_rows", None), 8),
        ({"tensor": 8}, 4, ("cache_rows", None), 8),
        ({"data": 4, "expert": 2}, 3, ("batch", None), 8),
    ],
)
def test_each_device_of_a_tensor_group_keeps_heads_of_a_cache_or_rows_of_it(
    sizes, heads, want, ways
):
    mesh = make_mesh(sizes)
    with jax.set_mesh(mesh):
        assert sharding.cache_axes(heads) == want
    assert sharding.ways(want[0], mesh) == ways
