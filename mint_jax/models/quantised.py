"""A frozen base in 8 bits: int8 or float8 matrices of the layers with a scale per output channel.

``w[:, f] ~ q[:, f] * scale[f]`` with ``scale[f] = max |w[:, f]| / top``, rounded to nearest. The
router, whose choices are discrete, the expansion of latents, which attention absorbs, and the gate
of shared experts, one column, are kept.

Axes: D in, F out. LLM.int8() (arXiv 2208.07339) section 2.1, without its outlier path.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mint_jax import params as params_lib
from mint_jax.params import ParamSpec
from pallas_kernels.products import product, product_f32

KINDS: dict[str, tuple[Any, float]] = {
    "int8": (np.dtype(np.int8), 127.0),
    "float8": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
}
KEPT = ("router", "kv_b", "shared_gate")  # projections that stay in the base's dtype


def specs(tree: Any, kind: str) -> Any:
    """Returns the specs with ``w`` in 8 bits and ``scale [..., F]`` float32 for matrices."""
    flat: dict[str, ParamSpec] = {}
    for path, spec in params_lib.leaves_with_path(tree):
        owner, _, leaf = path.rpartition("/")
        if leaf == "w" and spec.axes[0] == "layers" and owner.rsplit("/", 1)[-1] not in KEPT:
            flat[path] = ParamSpec(spec.shape, spec.axes, KINDS[kind][0])
            flat[f"{owner}/scale"] = ParamSpec(
                (*spec.shape[:-2], spec.shape[-1]), (*spec.axes[:-2], spec.axes[-1]), jnp.float32
            )
        else:
            flat[path] = spec
    return params_lib.nest(flat)


def quantise(w: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns 8-bit values of ``w [..., D, F]`` and scales ``[..., F]``, 1 for a zero channel."""
    dtype, top = KINDS[kind]
    w = np.asarray(w, np.float32)
    scale = np.max(np.abs(w), axis=-2) / np.float32(top)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    q = w / scale[..., None, :]
    return (np.rint(q) if dtype == np.int8 else q).astype(dtype), scale


def matmul(x_BTD: jax.Array, leaf: dict[str, Any]) -> jax.Array:
    """Returns ``x W``, ``[B, T, F]`` in the dtype of ``x``, of a plain or quantised projection."""
    if "scale" not in leaf:
        return product("BTD,DF->BTF", x_BTD, leaf["w"])
    return scaled(product_f32("BTD,DF->BTF", x_BTD, leaf["w"]), leaf).astype(x_BTD.dtype)


def scaled(y: jax.Array, leaf: dict[str, Any]) -> jax.Array:
    """Scales the product with a stored matrix to that with the real matrix."""
    # A scale per column comes after the matmul: F multiplications a row instead of D times F, and
    # the matrix is read in 8 bits.
    return y * leaf["scale"][None, None] if "scale" in leaf else y
