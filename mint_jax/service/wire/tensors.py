"""Tokens and tensors of requests; tensors are dense, or sparse rows (CSR) whose unlisted cells are
0.

Nothing larger than the request is allocated, except by ``Tensor.dense`` and ``packed``, which
``MAX_CELLS`` bounds: a shape is only a claim. ``what`` names a value in messages.

Axes: N positions, K targets of a position, n listed cells.
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from mint_jax.errors import UserError, choice
from mint_jax.service.validation import Body, shown
from mint_jax.service.wire import messages

MAX_CELLS = 2**22  # N K of sparse tensors, of one request together: 16 MB of answers a field
FORMS = {  # numpy type of values in protobuf, and whether they are whole numbers
    messages.FLOAT32: ("<f4", False),
    messages.INT64: ("<i8", True),
    messages.INT32: ("<i4", True),
    messages.BFLOAT16: ("<u2", False),
}


def as_int32(values: np.ndarray, what: str) -> np.ndarray:
    """Returns whole numbers as int32. Raises ``UserError`` if one needs more bits."""
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        wrong = int(values.min() if values.min() < -(2**31) else values.max())
        raise UserError(f"{what} has {wrong}; expected token ids of this base")
    return values.astype(np.int32)


def array_of(values: list[Any], whole: bool, what: str) -> np.ndarray:
    """Returns numbers of JSON as int64 or float64 ``[n]``. Raises ``UserError``."""
    if set(map(type, values)) <= ({int} if whole else {int, float}):
        try:
            return np.array(values, np.int64 if whole else np.float64)
        except OverflowError:
            pass
    expected = "whole numbers of 64 bits" if whole else "numbers"
    raise UserError(f"{what} is {shown(values)}; expected a list of {expected}")


def raw(data: bytes, dtype: str, what: str) -> np.ndarray:
    """Returns little-endian bytes as a flat array, a view. Raises ``UserError``."""
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise UserError(
            f"{what} has {len(data)} bytes; expected a multiple of {size}, little-endian"
            f" {np.dtype(dtype).name}"
        )
    return np.frombuffer(data, dtype)


class Chunk(Body):
    """Text of a model's input. Items of ``tokens`` are validated as one array."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Any]


class ModelInput(Body):
    chunks: list[Chunk]

    def tokens(self, what: str) -> np.ndarray:
        """Returns the text's token ids, int32 ``[N]``."""
        chunks = [
            as_int32(array_of(chunk.tokens, True, f"{what}.chunks[{i}].tokens"), what)
            for i, chunk in enumerate(self.chunks)
        ]
        return np.concatenate([np.zeros(0, np.int32), *chunks])


def proto_tokens(chunks: Any, what: str) -> np.ndarray:
    """Returns the token ids of ``Chunk`` messages, int32 ``[N]``."""
    texts = [np.zeros(0, np.int32)]
    for i, chunk in enumerate(chunks):
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise UserError(
                f"{what}.chunks[{i}] is of type {shown(kind)}; this base reads text only: send"
                " chunks of type encoded_text"
            )
        texts.append(raw(chunk.encoded_text.tokens, "<i4", f"{what}.chunks[{i}].tokens"))
    return np.concatenate(texts)


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor as sent.

    Attributes:
        values: flat, row after row: all cells or the listed ones; int64 or floats.
        shape: one or two axes.
        cells: ``[n]`` int64, flat indices of the listed cells, ascending; None if all are listed.
        rows: CSR's row pointers ``[N + 1]`` int64, and ``columns`` ``[n]`` int64; None if all cells
            are listed.
    """

    what: str
    values: np.ndarray
    shape: tuple[int, ...]
    cells: np.ndarray | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    def integers(self) -> np.ndarray:
        """Returns ``values`` as int32. Raises ``UserError`` if they are floats or too large."""
        if self.values.dtype.kind != "i":
            raise UserError(f"{self.what} has numbers of type float; expected int64, token ids")
        return as_int32(self.values, self.what)

    def floats(self) -> np.ndarray:
        """Returns ``values`` as finite float32. Raises ``UserError``."""
        with np.errstate(over="ignore"):
            out = self.values.astype(np.float32)
        if not np.isfinite(out).all():
            where = int(np.flatnonzero(~np.isfinite(out))[0])
            raise UserError(
                f"{self.what} has {shown(self.values[where].item())} at {where}; expected finite"
                " numbers of float32"
            )
        return out

    def dense(self, values: np.ndarray) -> np.ndarray:
        """Returns values of the listed cells in the tensor's shape."""
        if self.cells is None:
            return values.reshape(self.shape)
        out = np.zeros(math.prod(self.shape), values.dtype)
        out[self.cells] = values
        return out.reshape(self.shape)


def from_proto(message: Any, what: str) -> Tensor:
    """Returns the tensor of a ``Tensor`` message.

    Raises:
        UserError: its bytes, type and shape do not match.
    """
    if message.dtype not in FORMS:
        known = ["1 (float32)", "2 (int64)", "3 (int32)", "4 (bfloat16)"]
        raise choice(f"{what}: dtype", message.dtype, known)
    dtype, whole = FORMS[message.dtype]
    kind = message.WhichOneof("encoding")
    if kind is None:
        raise UserError(f"{what} has no values: send it dense or as sparse_csr")
    sparse = message.sparse_csr if kind == "sparse_csr" else None
    values = raw(message.dense if sparse is None else sparse.values, dtype, what)
    if message.dtype == messages.BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)  # the upper half of a float32
    elif whole:
        values = values.astype(np.int64)
    csr = [] if sparse is None else [sparse.crow_indices, sparse.col_indices]
    return _tensor(what, values, message.shape, *(raw(one, "<i8", what) for one in csr))


class TensorBody(Body):
    """A tensor in JSON. Items of the lists are validated as arrays."""

    data: list[Any]
    dtype: Literal["float32", "bfloat16", "int64", "int32"]
    shape: list[Any] | None = None
    sparse_crow_indices: list[Any] | None = None
    sparse_col_indices: list[Any] | None = None


def from_json(tensor: TensorBody, what: str) -> Tensor:
    """Returns the tensor of a JSON body. Raises ``UserError`` as ``from_proto`` does."""
    values = array_of(tensor.data, tensor.dtype.startswith("int"), f"{what}: data")
    csr = [tensor.sparse_crow_indices, tensor.sparse_col_indices]
    if csr == [None, None]:
        return _tensor(what, values, tensor.shape or [])
    indices = (array_of(one or [], True, f"{what}: indices") for one in csr)
    return _tensor(what, values, tensor.shape or [], *indices)


def to_json(array: np.ndarray) -> dict[str, Any]:
    """Returns an array as a JSON tensor; whole numbers as int64, others as float32."""
    dtype = "int64" if array.dtype.kind == "i" else "float32"
    return {"data": array.reshape(-1).tolist(), "dtype": dtype, "shape": list(array.shape)}


def _tensor(what: str, values: np.ndarray, dims: Any, *csr: np.ndarray) -> Tensor:
    """Returns a tensor, sparse if CSR's row pointers and columns are given."""
    shape, n = tuple(dims) or (values.size,), values.size
    if len(shape) > 2 or any(type(d) is not int or not 0 <= d < 2**62 for d in shape):
        raise UserError(
            f"{what} has shape {shown(list(shape))[:80]}; expected one or two axes, none below 0"
        )
    if not csr:
        if math.prod(shape) != n:
            raise UserError(
                f"{what} has {n} values; its shape {list(shape)} has {math.prod(shape)}"
            )
        return Tensor(what, values, shape)
    rows, columns = csr
    if len(shape) != 2 or math.prod(shape) > MAX_CELLS:
        raise UserError(
            f"{what} is sparse, of shape {list(shape)}; expected two axes of {MAX_CELLS} cells at"
            " most: send fewer columns"
        )
    N, K = shape
    if rows.size != N + 1 or columns.size != n:
        raise UserError(
            f"{what} has {rows.size} crow_indices, {columns.size} col_indices and {n} values; shape"
            f" {list(shape)} takes {N + 1}, and as many columns as values"
        )
    if rows[0] != 0 or rows[-1] != n or rows.min() < 0 or (np.diff(rows) < 0).any():
        raise UserError(
            f"{what}: crow_indices do not ascend from 0 to the {n} values: send row pointers"
        )
    if n and not 0 <= columns.min() <= columns.max() < K:
        raise UserError(
            f"{what}: col_indices has {int(columns.min())} to {int(columns.max())}; shape"
            f" {list(shape)} has columns 0 to {K - 1}"
        )
    cells = np.repeat(np.arange(N), np.diff(rows)) * K + columns
    if (np.diff(cells) <= 0).any():
        raise UserError(
            f"{what}: col_indices do not ascend in every row: sort them, and list each cell once"
        )
    return Tensor(what, values, shape, cells, rows, columns)


def packed(targets: Tensor, weights: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns sparse targets and weights of one shape ``[N, K]`` with each row's cells moved to the
    left, so that the computed arrays are narrow.

    A cell counts if either tensor lists it: a sparse tensor omits zeros, also token 0 and weight 0.
    After a row's listed cells one cell stands for all others, target 0 with weight 0, whose
    log-probability they share.

    Returns:
        Targets ``[N, k]`` int32, weights ``[N, k]`` float32, and for each sent cell its column in
        the packed row, ``[N, K]`` int32: ``np.take_along_axis(.., 1)`` unpacks results.
        None for the columns if k is K.
    """
    (N, K), ids, floats = targets.shape, targets.integers(), weights.floats()
    of_ids, of_floats = targets.cells, weights.cells
    assert of_ids is not None, "the targets are sparse"
    assert of_floats is not None, "the weights are sparse"
    cells = np.union1d(of_ids, of_floats)
    rows = cells // max(K, 1)
    listed = np.bincount(rows, minlength=N)
    k = int(np.minimum(listed + 1, K).max(initial=0))
    if k == K:
        return targets.dense(ids), weights.dense(floats), None
    ranks = np.arange(cells.size) - (np.cumsum(listed) - listed)[rows]
    source = np.repeat(listed.astype(np.int32)[:, None], K, axis=1)
    source.reshape(-1)[cells] = ranks
    out = np.zeros((N, k), np.int32), np.zeros((N, k), np.float32)
    for array, own, values in zip(out, (of_ids, of_floats), (ids, floats)):
        at = np.searchsorted(cells, own)
        array[rows[at], ranks[at]] = values
    return *out, source
