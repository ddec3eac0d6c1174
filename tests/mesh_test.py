"""Meshes from sizes: the fixed order of axes, one axis that takes what is left, and sizes that do
not fit.
"""

import jax
import pytest

from mint_jax.errors import UserError
from mint_jax.mesh import AXES, make_mesh


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        (None, (8, 1, 1, 1)),
        ({"tensor": 2, "data": 4}, (4, 1, 1, 2)),
        ({"fsdp": -1}, (1, 8, 1, 1)),
        ({"data": 2, "expert": -1, "tensor": 2}, (2, 1, 2, 2)),
    ],
)
def test_sizes_become_axes_in_the_fixed_order(sizes, shape):
    mesh = make_mesh(sizes)
    assert mesh.axis_names == AXES == ("data", "fsdp", "expert", "tensor")
    assert mesh.devices.shape == shape
    # tensor, the axis that talks most, has neighbours
    assert mesh.devices.ravel().tolist() == jax.devices()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"data": 4, "model": 2}, "mesh axis 'model' is unknown; the axes are data, fsdp, expert"),
        ({"data": 4}, r"'data': 4.*needs 4 devices but 8 are here.*the product is 8.* to -1"),
        ({"data": 16, "tensor": -1}, "but 8 are here.*the product is 8"),
        ({"data": -1, "fsdp": -1}, "'data': -1, 'fsdp': -1.*only one axis may be -1"),
        ({"data": 0}, "'data': 0.*the product is 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, says):
    with pytest.raises(UserError, match=says):
        make_mesh(sizes)
