"""The table of logical axes: what it makes of specs and meshes, and what it refuses."""

import jax
import pytest
from jax.sharding import PartitionSpec

from mint_jax import sharding
from mint_jax.mesh import make_mesh

P = PartitionSpec


CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("sizes", "axes", "want"),
    [
        (CUBE, ("batch", "tokens", "act_embed"), P(("data", "fsdp"), None, None)),
        ({"fsdp": 8}, ("batch",), P("fsdp")),
        (CUBE, ("layers", "embed", "q_heads"), P(None, "fsdp", "tensor")),
        ({"fsdp": 2, "expert": 4}, ("experts", "expert_ffw"), P(("fsdp", "expert"), None)),
    ],
)
def test_logical_axes_become_mesh_axes(sizes, axes, want):
    assert sharding.partition(axes, make_mesh(sizes)) == want


def test_two_dimensions_on_one_mesh_axis_are_refused():
    mesh = make_mesh({"data": 4, "tensor": 2})
    with pytest.raises(
        ValueError,
        match=r"\('q_heads', 'ffw'\) map mesh axis 'tensor' to two dimensions",
    ):
        sharding.partition(("q_heads", "ffw"), mesh)
    assert sharding.partition(("q_heads", "ffw"), make_mesh({"data": 8})) == P(None, None)


@pytest.mark.parametrize(
    ("sizes", "heads", "want", "ways"),
    [
        (CUBE, 4, ("batch", "kv_heads"), 4),
        # heads that do not divide
        (CUBE, 3, ("cache_rows", None), 8),
        (CUBE, None, ("cache_rows", None), 8),
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
