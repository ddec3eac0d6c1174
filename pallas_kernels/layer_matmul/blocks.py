"""Matrices of a 4- or 8-bit checkpoint: blocks of 32 numbers with a scale, as in ggml.

A 4-bit weight is ``q d + m`` with d and m float16 (``Q4_1``), an 8-bit one ``q d`` (``Q8_0``); an
unpacked weight has the bits of the dequantised checkpoint. A matrix ``[D, F]`` is uint8 ``[F / 64,
D / 32, bytes]``: d of 64 columns, and m with 4 bits, then 64 bytes for every input, or for every
two with 4 bits, the first in the lower half.

Axes: L layers, D in, F out, P panels of F, N blocks of D.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native

COLUMNS, DEPTH = 64, 32  # size of a block


class Kind(NamedTuple):
    """A block format."""

    # bytes of one output's block in a checkpoint: d, m if any, and the numbers; with 4 bits those
    # of inputs j and j + 16 in byte j
    row: int
    scales: int  # number of float16 values at its start

    @property
    def bytes(self) -> int:
        """Bytes of a block of 64 columns."""
        return COLUMNS * self.row


KINDS = {"Q4_1": Kind(4 + DEPTH // 2, 2), "Q8_0": Kind(2 + DEPTH, 1)}


def fit(D: int, F: int) -> bool:
    """Returns True if a matrix ``[D, F]`` is whole blocks."""
    return D % DEPTH == 0 and F % COLUMNS == 0


def is_packed(w: jax.Array | np.ndarray) -> bool:
    """Returns True for a matrix in blocks, or a stack of them."""
    return w.dtype == np.uint8


def blocks_shape(D: int, F: int, kind: str) -> tuple[int, int, int]:
    """Returns the shape ``[P, N, bytes]`` of a matrix ``[D, F]``."""
    return F // COLUMNS, D // DEPTH, KINDS[kind].bytes


def matrix_shape(blocks: jax.Array) -> tuple[int, int]:
    """Returns D and F of ``[..., P, N, bytes]``."""
    return blocks.shape[-2] * DEPTH, blocks.shape[-3] * COLUMNS


def pack(rows: np.ndarray, kind: str) -> np.ndarray:
    """Packs a checkpoint's matrix, uint8 ``[F, N * row]``, to uint8 ``[P, N, bytes]``."""
    row, scales = KINDS[kind]
    F, N = rows.shape[0], rows.shape[1] // row
    rows = rows.reshape(F // COLUMNS, COLUMNS, N, row).transpose(0, 2, 1, 3)  # [P, N, 64, row]
    numbers = rows[..., 2 * scales :]
    if kind == "Q4_1":
        numbers = np.concatenate([numbers & 15, numbers >> 4], axis=-1)
        numbers = numbers[..., 0::2] | numbers[..., 1::2] << 4
    parts = *(rows[..., 2 * i : 2 * i + 2] for i in range(scales)), numbers.swapaxes(2, 3)
    return np.concatenate(
        [np.ascontiguousarray(part).reshape(*rows.shape[:2], -1) for part in parts], axis=-1
    )


def _halves(part: jax.Array) -> jax.Array:
    """Returns float32 ``[..., 1, 64]`` from bytes ``[..., 128]``."""
    pairs = part.reshape(*part.shape[:-1], 1, COLUMNS, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


def _weights(blocks: jax.Array) -> jax.Array:
    """Returns float32 ``[..., 32, 64]`` from blocks ``[..., bytes]``."""
    rest = blocks.shape[:-1]
    if blocks.shape[-1] == KINDS["Q8_0"].bytes:
        q = jax.lax.bitcast_convert_type(blocks[..., 2 * COLUMNS :], jnp.int8).reshape(
            *rest, DEPTH, COLUMNS
        )
        return q.astype(jnp.float32) * _halves(blocks[..., : 2 * COLUMNS])
    d, m = _halves(blocks[..., : 2 * COLUMNS]), _halves(blocks[..., 2 * COLUMNS : 4 * COLUMNS])
    q = blocks[..., 4 * COLUMNS :].reshape(*rest, DEPTH // 2, 1, COLUMNS)
    q = jnp.concatenate([q & 15, q >> 4], axis=-2).reshape(*rest, DEPTH, COLUMNS)
    return q.astype(jnp.float32) * d + m


def unpack(blocks: jax.Array, transposed: bool = False) -> jax.Array:
    """Unpacks ``[P, N, bytes]`` to float32 ``[D, F]``, or ``[F, D]``, by XLA."""
    D, F = matrix_shape(blocks)
    w_PNKC = _weights(blocks)
    if transposed:
        return w_PNKC.transpose(0, 3, 1, 2).reshape(F, D)
    return w_PNKC.transpose(1, 2, 0, 3).reshape(D, F)


def unpack_by_cpu(blocks: jax.Array, transposed: bool = False) -> jax.Array:
    D, F = matrix_shape(blocks)
    out = jax.ShapeDtypeStruct((F, D) if transposed else (D, F), jnp.float32)
    return native.call("mint_block_unpack", out, blocks, transposed=transposed)


def require_cpu(blocks: jax.Array, **_: bool) -> None:
    """Raises NotImplementedError with the reason if ``unpack_by_cpu`` cannot serve."""
    native.require_one_device()
    native.require()


def columns(blocks: jax.Array, at: jax.Array) -> jax.Array:
    """Gathers columns of an 8-bit matrix, ``[..., D]`` float32 at int32 ``[...]``."""
    P, N, _ = blocks.shape
    panel, column = at // COLUMNS, at % COLUMNS
    q = blocks[..., 2 * COLUMNS :].reshape(P, N, DEPTH, COLUMNS)[panel, :, :, column]
    d = blocks[..., : 2 * COLUMNS].reshape(P, N, COLUMNS, 2)[panel, :, column]
    d = jax.lax.bitcast_convert_type(d, jnp.float16).astype(jnp.float32)
    return (jax.lax.bitcast_convert_type(q, jnp.int8).astype(jnp.float32) * d[..., None]).reshape(
        *at.shape, -1
    )
