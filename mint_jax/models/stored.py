"""A float32 base whose weights stay in the bits of the checkpoint: a half or a sixth of the bytes,
and the same numbers.

A checkpoint converted from 4 bits (``gguf.py``) has float32 weights for all readers, and
``model.blocks`` with the original blocks, which one CPU keeps in memory, since the bytes of the
weights bound decoding. A training step unpacks each layer when it runs.

Axes: B rows, T tokens, L layers, D in, F out, V vocab; blocks as in ``layer_matmul.blocks``.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.models.quantised import KEPT
from mint_jax.params import ParamSpec
from pallas_kernels import native
from pallas_kernels.layer_matmul import blocks, unpack

FILE = "model.blocks"
TABLES = ("embed/w", "unembed/w")
MATRIX, TABLE = "Q4_1", "Q8_0"  # supported kinds of blocks


def save(tensors: Mapping[str, tuple[str, np.ndarray]], fingerprint: str, directory: Path) -> None:
    """Writes tensors, name -> kind and uint8 ``[F, N * row]``, with their fingerprint."""
    kinds = json.dumps({name: kind for name, (kind, _) in tensors.items()})
    arrays = {name: np.ascontiguousarray(rows) for name, (_, rows) in tensors.items()}
    save_file(arrays, directory / FILE, metadata={"kinds": kinds, "fingerprint": fingerprint})


class BlockFile:
    """Packed blocks of a checkpoint; raises ``UserError`` if unreadable or of other weights."""

    def __init__(self, directory: Path, fingerprint: str):
        self.path = directory / FILE
        try:
            self._file = safe_open(self.path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self.path} cannot be read ({error}): remove it to load the float32 weights"
            ) from None
        about = self._file.metadata() or {}
        if about.get("fingerprint") != fingerprint:
            raise UserError(
                f"{self.path} has other weights than its checkpoint: remove it to load the float32"
                " weights"
            )
        self.kinds: dict[str, str] = json.loads(about["kinds"])

    def tensor(self, name: str) -> np.ndarray:
        """Returns the packed blocks of a tensor, ``[P, N, bytes]``."""
        return blocks.pack(self._file.get_tensor(name), self.kinds[name])


def reason_against(dtype: Any, quantise: str, devices: Sequence[Any], kernel: str) -> str:
    """Returns the reason why these settings need weights in full; empty if they do not."""
    if quantise or dtype != jnp.float32 or kernel == "xla":
        return "the settings need other weights or matmuls"
    if len(devices) > 1 or devices[0].platform != "cpu":
        return "the kernels for stored weights run on one CPU only"
    try:
        native.require()
    except NotImplementedError as reason:
        return str(reason)
    return ""


def specs(tree: Any, kinds_of: Callable[[str, ParamSpec], set[str]]) -> Any:
    """Returns the specs of a base in blocks or 16 bits: all matrices of the layers if all are so
    and fit, and each such table. ``kinds_of`` returns the kinds of blocks or dtypes of a leaf's
    tensors.
    """
    flat = dict(params_lib.leaves_with_path(tree))
    matrices = {
        path
        for path, spec in flat.items()
        if path.endswith("/w") and len(spec.shape) == 3 and path.split("/")[-2] not in KEPT
    }
    kept = {
        path: own
        for path in (*matrices, *(path for path in TABLES if path in flat))
        if (own := _as_stored(flat[path], kinds_of(path, flat[path]), path in TABLES)) is not None
    }
    whole = {kept[path].dtype for path in matrices if path in kept}
    if not matrices <= kept.keys() or len(whole) > 1:
        kept = {path: spec for path, spec in kept.items() if path in TABLES}
    return params_lib.nest(flat | kept)


def _as_stored(spec: ParamSpec, kinds: set[str], is_table: bool) -> ParamSpec | None:
    if kinds == {"BF16"}:
        return dataclasses.replace(spec, dtype=jnp.bfloat16)
    *layers, D, F = spec.shape[::-1] if is_table else spec.shape
    kind = TABLE if is_table else MATRIX
    if kinds != {kind} or not blocks.fit(D, F):
        return None
    axes = ("layers", None, None, None)[1 - len(layers) :]
    return ParamSpec((*layers, *blocks.blocks_shape(D, F, kind)), axes, np.uint8)


def narrower(w: jax.Array, x: jax.Array) -> bool:
    """Returns True for a matrix without scales in fewer bits than its float32 matmul."""
    return blocks.is_packed(w) or (w.dtype == jnp.bfloat16 and x.dtype == jnp.float32)


# The gradient unpacks a matrix again instead of keeping it.
@jax.custom_vjp
def matmul(x_BTD: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ``x W`` in float32, ``[B, T, F]``, for one layer's matrix as stored."""
    return jnp.einsum("BTD,DF->BTF", x_BTD, _full(w), preferred_element_type=jnp.float32)


def _full(w: jax.Array) -> jax.Array:
    return unpack(w) if blocks.is_packed(w) else w.astype(jnp.float32)


def _backward(w: jax.Array, g_BTF: jax.Array) -> tuple[jax.Array, None]:
    return jnp.einsum("BTF,DF->BTD", g_BTF, _full(w)), None


matmul.defvjp(lambda x, w: (matmul(x, w), w), _backward)


def table(w: jax.Array, dtype: Any) -> jax.Array:
    """Returns an embedding table ``[V, D]`` in ``dtype`` or a wider one."""
    if blocks.is_packed(w):
        return unpack(w, transposed=True)
    return w.astype(jnp.promote_types(w.dtype, dtype))


def table_shape(w: jax.Array) -> tuple[int, int]:
    """Returns V and D of an embedding table as stored."""
    V, D = blocks.matrix_shape(w)[::-1] if blocks.is_packed(w) else w.shape
    return V, D


def rows(w: jax.Array, at: jax.Array, dtype: Any) -> jax.Array:
    """Gathers rows ``[..., D]`` of a stored embedding at int32 ``[...]``, in the base's dtype."""
    return blocks.columns(w, at) if blocks.is_packed(w) else w[at].astype(dtype)
