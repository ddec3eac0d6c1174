"""Meshes from sizes: the fixed order of axes, one axis that takes what is left, and sizes that do
not fit.
"""

import pytest

from mint_jax.errors import UserError
from mint_jax.mesh import make_mesh


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
