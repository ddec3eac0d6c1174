"""Programs as they are lowered for a GPU, where there is none."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

# from JAX 0.12 on Pallas asks for which
HOPPER = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
KERNEL = "__gpu$xla.gpu.triton"


def abstract() -> Any:
    """A context in which programs for GPUs are lowered where there is none."""
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=HOPPER)
    )


def text(fn: Callable[..., Any], *args: Any) -> str:
    """What a call of ``fn`` is lowered to."""
    with abstract():
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
