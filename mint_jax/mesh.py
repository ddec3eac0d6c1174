"""The device mesh: axes ``data``, ``fsdp``, ``expert``, ``tensor``, always in this order.

``data`` replicates the base and splits rows; ``fsdp`` splits rows and the base's embed dimension;
``expert`` splits rows; ``tensor`` splits heads, ffw and vocabulary. Routed experts are split over
the last three together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mint_jax.errors import UserError

AXES = ("data", "fsdp", "expert", "tensor")


def make_mesh(sizes: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Builds a mesh over ``devices``, by default all, on ``data`` if there are no ``sizes``. Absent
    axes are 1, and one may be -1, the rest. Raises ``UserError``: an axis is unknown, or the sizes
    do not fit.
    """
    devices = list(jax.devices()) if devices is None else devices
    sizes = {"data": -1} if sizes is None else dict(sizes)
    if unknown := set(sizes) - set(AXES):
        raise UserError(f"mesh axis {min(unknown)!r} is unknown; the axes are {', '.join(AXES)}")
    shape = [int(sizes.get(axis, 1)) for axis in AXES]
    if shape.count(-1) > 1:
        raise UserError(f"mesh sizes {dict(zip(AXES, shape))}: only one axis may be -1 (fill)")
    if -1 in shape:
        known = math.prod(s for s in shape if s != -1)
        shape[shape.index(-1)] = max(1, len(devices) // max(1, known))
    if min(shape) < 1 or math.prod(shape) != len(devices):
        raise UserError(
            f"mesh {dict(zip(AXES, shape))} needs {math.prod(shape)} devices but {len(devices)} are"
            f" here: set --config.mesh.<axis> so that the product is {len(devices)}, or one of them"
            " to -1"
        )
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def single_device_mesh(device: Any = None) -> Mesh:
    """Builds a mesh of one device, so that the same code runs everywhere."""
    return make_mesh({}, [device or jax.devices()[0]])
