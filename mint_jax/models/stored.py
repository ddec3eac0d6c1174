"""A float32 base whose weights stay as its checkpoint has them: a half or a sixth of the bytes, and
bit for bit the same numbers.

Most checkpoints have bfloat16. One converted from 4 bits (``gguf.py``) has its weights in float32,
for everyone, and beside them ``model.blocks`` with the same in the blocks that they came in. One
CPU with the kernels of ``pallas_kernels.layer_matmul`` holds these: decoding is bound by the bytes
of the weights. Products are float32's, so norms, the router, the latents' expansion and routed
experts are held in that. A training step unpacks each layer when it comes to it, where it would
copy it out of the stack.

Axes: B rows, T tokens, L layers, D in, F out, V vocab, P and N panels and blocks, see
``pallas_kernels.layer_matmul.blocks``.
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
MATRIX, TABLE = "Q4_1", "Q8_0"  # the kinds of blocks that are held so


def save(tensors: Mapping[str, tuple[str, np.ndarray]], fingerprint: str, directory: Path) -> None:
    """Writes the file.

    Args:
        tensors: name -> kind and uint8 ``[F, N * row]``, as ``blocks.pack`` takes it.
        fingerprint: of the checkpoint that it belongs to.
    """
    about = {
        "kinds": json.dumps({name: kind for name, (kind, _) in tensors.items()}),
        "fingerprint": fingerprint,
    }
    save_file(
        {name: np.ascontiguousarray(rows) for name, (_, rows) in tensors.items()},
        directory / FILE,
        metadata=about,
    )


class BlockFile:
    """The blocks of a checkpoint.

    Raises:
        UserError: a file that cannot be read, or one of other weights.
    """

    def __init__(self, directory: Path, fingerprint: str):
        self.path = directory / FILE
        try:
            self._file = safe_open(self.path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self.path} cannot be read ({error}): remove it, and the weights beside it are"
                " held in full"
            ) from None
        about = self._file.metadata() or {}
        if about.get("fingerprint") != fingerprint:
            raise UserError(
                f"{self.path} is of other weights than those beside it: remove it, and these are"
                " held in full"
            )
        self.kinds: dict[str, str] = json.loads(about["kinds"])

    def tensor(self, name: str) -> np.ndarray:
        """The packed blocks of a tensor, ``[P, N, bytes]``."""
        return blocks.pack(self._file.get_tensor(name), self.kinds[name])


def why_not(dtype: Any, quantise: str, devices: Sequence[Any], kernel: str) -> str:
    """Why this machine and these settings hold a base's weights in full; empty where they may stay
    as they are stored.
    """
    if quantise or dtype != jnp.float32 or kernel == "xla":
        return "settings ask for other weights or products"
    if len(devices) > 1 or devices[0].platform != "cpu":
        return "only one CPU has their kernels"
    try:
        native.require()
    except NotImplementedError as reason:
        return str(reason)
    return ""


def _matrices(flat: Mapping[str, ParamSpec]) -> set[str]:
    """Paths of the layers' dense matrices."""
    return {
        path
        for path, spec in flat.items()
        if path.endswith("/w") and len(spec.shape) == 3 and path.split("/")[-2] not in KEPT
    }


def specs(tree: Any, kind_of: Callable[[str, ParamSpec], set[str]]) -> Any:
    """The specs of a base in 16 bits: all matrices of the layers, if all come in them, and each
    table that does.

    Args:
        tree: the specs in float32.
        kind_of: path and spec -> dtypes of its tensors, as safetensors calls them.
    """
    flat = dict(params_lib.leaves_with_path(tree))
    matrices = _matrices(flat)
    if not all(kind_of(path, flat[path]) == {"BF16"} for path in matrices):
        matrices = set()
    for path, spec in flat.items():
        if path in matrices or (path in TABLES and kind_of(path, spec) == {"BF16"}):
            flat[path] = dataclasses.replace(spec, dtype=jnp.bfloat16)
    return params_lib.nest(flat)


def specs_in_blocks(tree: Any, kind_of: Callable[[str, ParamSpec], set[str]]) -> Any:
    """The specs of a base in blocks: all matrices of the layers, if all come in blocks that fit,
    and each table that does.

    Args:
        tree: the specs in float32.
        kind_of: path and spec -> kinds of its tensors, ``""`` for what comes in none.
    """
    flat = dict(params_lib.leaves_with_path(tree))
    matrices = _matrices(flat)
    if not all(
        kind_of(path, flat[path]) == {MATRIX} and blocks.fit(*flat[path].shape[1:])
        for path in matrices
    ):
        matrices = set()
    for path, spec in flat.items():
        if path in matrices:
            L, D, F = spec.shape
            flat[path] = ParamSpec(
                (L, *blocks.blocks_shape(D, F, MATRIX)), ("layers", None, None, None), np.uint8
            )
        elif path in TABLES and kind_of(path, spec) == {TABLE} and blocks.fit(*spec.shape[::-1]):
            V, D = spec.shape
            flat[path] = ParamSpec(blocks.blocks_shape(D, V, TABLE), (None, None, None), np.uint8)
    return params_lib.nest(flat)


def narrower(w: jax.Array, x: jax.Array) -> bool:
    """Whether a matrix is held in fewer bits than the float32 that it is multiplied in, and without
    a scale: see ``quantised.py``.
    """
    return blocks.are(w) or (w.dtype == jnp.bfloat16 and x.dtype == jnp.float32)


@jax.custom_vjp
def matmul(x_BTD: jax.Array, w: jax.Array) -> jax.Array:
    """``x W`` in float32, ``[B, T, F]``, of one layer's matrix as it is held; put in full again for
    the gradient, not kept.
    """
    return jnp.einsum("BTD,DF->BTF", x_BTD, _full(w), preferred_element_type=jnp.float32)


def _full(w: jax.Array) -> jax.Array:
    """``[D, F]`` float32."""
    return unpack(w) if blocks.are(w) else w.astype(jnp.float32)


def _backward(w: jax.Array, g_BTF: jax.Array) -> tuple[jax.Array, None]:
    return jnp.einsum("BTF,DF->BTD", g_BTF, _full(w)), None


matmul.defvjp(lambda x, w: (matmul(x, w), w), _backward)


def table(w: jax.Array, dtype: Any) -> jax.Array:
    """The table ``[V, D]`` of an embedding as it is held, in ``dtype`` at least."""
    return (
        unpack(w, transposed=True) if blocks.are(w) else w.astype(jnp.promote_types(w.dtype, dtype))
    )


def table_shape(w: jax.Array) -> tuple[int, int]:
    """V and D of an embedding as it is held."""
    V, D = blocks.matrix_shape(w)[::-1] if blocks.are(w) else w.shape
    return V, D


def rows(w: jax.Array, at: jax.Array, dtype: Any) -> jax.Array:
    """Rows ``[..., D]`` of an embedding as it is held, at int32 ``[...]``, in the base's dtype."""
    return blocks.columns(w, at) if blocks.are(w) else w[at].astype(dtype)
