"""Tokens and tensors of requests and answers, in JSON and in protobuf. A tensor is dense, or sparse
rows (CSR) whose unlisted cells are 0.

Nothing larger than the request is allocated, except by ``Tensor.dense``, which ``MAX_CELLS``
bounds: a shape is only a claim. ``what`` names a value in messages.

Axes: N positions, K targets of a position, n values.
"""

import dataclasses
import math
from typing import Any, Literal

import ml_dtypes
import numpy as np

from mint_jax.errors import UserError, choice
from mint_jax.service.validation import Body, shown
from mint_jax.service.wire import messages

MAX_CELLS = 2**22  # N K of sparse tensors, of one request together: 16 MB of answers a field
FORMS = {
    messages.FLOAT32: np.dtype("<f4"),
    messages.INT64: np.dtype("<i8"),
    messages.INT32: np.dtype("<i4"),
    messages.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


class Chunk(Body):
    """Text of a model's input. Items of ``tokens`` are validated as one array."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Any]


class ModelInput(Body):
    chunks: list[Chunk]


class TensorBody(Body):
    """A tensor in JSON. Items of the lists are validated as arrays."""

    data: list[Any]
    dtype: Literal["float32", "bfloat16", "int64", "int32"]
    shape: list[Any] | None = None
    sparse_crow_indices: list[Any] | None = None
    sparse_col_indices: list[Any] | None = None


def as_int32(values: np.ndarray, what: str) -> np.ndarray:
    """Returns whole numbers as int32. Raises ``UserError`` if one needs more bits."""
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        wrong = int(values.min() if values.min() < -(2**31) else values.max())
        raise UserError(f"{what} has {wrong}; expected token ids of this base")
    return values.astype(np.int32)


def _listed(values: list[Any], whole: bool, what: str) -> np.ndarray:
    """Returns numbers of JSON as int64 or float64 ``[n]``."""
    if set(map(type, values)) <= ({int} if whole else {int, float}):
        try:
            return np.array(values, np.int64 if whole else np.float64)
        except OverflowError:
            pass
    expected = "whole numbers of 64 bits" if whole else "numbers"
    raise UserError(f"{what} is {shown(values)}; expected a list of {expected}")


def _raw(data: bytes, form: int, what: str) -> np.ndarray:
    """Returns little-endian bytes as a flat array, a view."""
    dtype = FORMS[form]
    if len(data) % dtype.itemsize:
        expected = f"a multiple of {dtype.itemsize}, little-endian {dtype.name}"
        raise UserError(f"{what} has {len(data)} bytes; expected {expected}")
    return np.frombuffer(data, dtype)


def tokens_of(sent: Any, what: str) -> np.ndarray:
    """Returns the token ids of a ``ModelInput`` or of ``Chunk`` messages, int32 ``[N]``. Raises
    ``UserError`` if one is not text, or too large.
    """
    parts = [np.zeros(0, np.int32)]
    for i, chunk in enumerate(sent.chunks if isinstance(sent, ModelInput) else sent):
        name = f"{what}.chunks[{i}]"
        if isinstance(chunk, Chunk):
            parts.append(as_int32(_listed(chunk.tokens, True, f"{name}.tokens"), what))
        elif (kind := chunk.WhichOneof("chunk")) == "encoded_text":
            parts.append(_raw(chunk.encoded_text.tokens, messages.INT32, f"{name}.tokens"))
        else:
            raise UserError(f"{name} is of type {shown(kind)}; this base reads encoded_text only")
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of one or two axes.

    Attributes:
        values: ``[n]``, row after row: all cells, or the listed ones of a sparse tensor.
        csr: row pointers ``[N + 1]`` and columns ``[n]``, int64; None if dense.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    csr: tuple[np.ndarray, np.ndarray] | None = None
    what: str = ""

    @property
    def cells(self) -> np.ndarray:
        """Flat index of each value, int64 ``[n]``."""
        if self.csr is None:
            return np.arange(self.values.size)
        rows, columns = self.csr
        return np.repeat(np.arange(self.shape[0]), np.diff(rows)) * self.shape[1] + columns

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
            found = f"{self.what} has {shown(self.values[where].item())} at {where}"
            raise UserError(f"{found}; expected finite numbers of float32")
        return out

    def numbers(self) -> np.ndarray:
        """Returns the tensor itself, int32 or float32. Raises ``UserError``."""
        return self.dense(self.integers() if self.values.dtype.kind == "i" else self.floats())

    def dense(self, values: np.ndarray) -> np.ndarray:
        """Returns numbers for ``values`` in the tensor's shape."""
        if self.csr is None:
            return values.reshape(self.shape)
        out = np.zeros(math.prod(self.shape), values.dtype)
        out[self.cells] = values
        return out.reshape(self.shape)


def tensor_of(sent: Any, what: str) -> Tensor:
    """Returns the tensor of a ``TensorBody`` or of a ``Tensor`` message. Raises ``UserError`` if
    its values, type and shape do not match.
    """
    if isinstance(sent, TensorBody):
        values = _listed(sent.data, sent.dtype.startswith("int"), f"{what}: data")
        csr = sent.sparse_crow_indices, sent.sparse_col_indices
        indices = [_listed(one or [], True, f"{what}: indices") for one in csr]
        return _tensor(what, values, sent.shape or (), None if csr == (None, None) else indices)
    if sent.dtype not in FORMS:
        known = ["1 (float32)", "2 (int64)", "3 (int32)", "4 (bfloat16)"]
        raise choice(f"{what}: dtype", sent.dtype, known)
    if (kind := sent.WhichOneof("encoding")) is None:
        raise UserError(f"{what} has no values: send it dense or as sparse_csr")
    csr, is_dense = sent.sparse_csr, kind == "dense"
    values = _raw(sent.dense if is_dense else csr.values, sent.dtype, what)
    values = values.astype(np.int64 if values.dtype.kind == "i" else np.float32)
    indices = [_raw(one, messages.INT64, what) for one in (csr.crow_indices, csr.col_indices)]
    return _tensor(what, values, sent.shape, None if is_dense else indices)


def _tensor(what: str, values: np.ndarray, sizes: Any, csr: list[np.ndarray] | None) -> Tensor:
    """Returns a valid tensor, sparse if CSR's row pointers and columns are given."""
    n, shape = values.size, tuple(sizes) or (values.size,)
    if len(shape) > 2 or any(type(d) is not int or not 0 <= d < 2**62 for d in shape):
        text = shown(list(shape))[:80]
        raise UserError(f"{what} has shape {text}; expected one or two axes, none below 0")
    count = math.prod(shape)
    if csr is None:
        if count != n:
            raise UserError(f"{what} has {n} values; its shape {list(shape)} has {count}")
        return Tensor(values, shape, None, what)
    if len(shape) != 2 or count > MAX_CELLS:
        expected = f"two axes of {MAX_CELLS} cells at most: send fewer columns"
        raise UserError(f"{what} is sparse, of shape {list(shape)}; expected {expected}")
    (N, K), (rows, columns) = shape, csr
    ascend = rows.size == N + 1 and (rows[1:] >= rows[:-1]).all()
    if not ascend or (rows[0], rows[-1], columns.size) != (0, n, n):
        found = f"{n} values, {columns.size} col_indices and {rows.size} crow_indices"
        expected = f"a column for each value, and {N + 1} row pointers that ascend from 0 to {n}"
        raise UserError(f"{what} has {found}; expected {expected}")
    tensor = Tensor(values, shape, (rows, columns), what)
    inside = n == 0 or 0 <= columns.min() <= columns.max() < K
    if not inside or (np.diff(tensor.cells) <= 0).any():
        found = f"col_indices do not ascend within columns 0 to {K - 1} in every row"
        raise UserError(f"{what}: {found}: sort them, and list each cell once")
    return tensor


def _dense(array: Tensor | np.ndarray) -> Tensor:
    return array if isinstance(array, Tensor) else Tensor(array.reshape(-1), array.shape)


def to_json(array: Tensor | np.ndarray) -> dict[str, Any]:
    """Returns the JSON of a tensor or array; whole numbers as int64, others as float32."""
    tensor = _dense(array)
    dtype = "int64" if tensor.values.dtype.kind == "i" else "float32"
    out = {"data": tensor.values.tolist(), "dtype": dtype, "shape": list(tensor.shape)}
    if tensor.csr is not None:
        out["sparse_crow_indices"], out["sparse_col_indices"] = (one.tolist() for one in tensor.csr)
    return out


def to_proto(array: Tensor | np.ndarray, message: Any) -> None:
    """Fills a ``Tensor`` message with the int32 or float32 values of a tensor or array."""
    tensor = _dense(array)
    message.dtype = messages.INT32 if tensor.values.dtype.kind == "i" else messages.FLOAT32
    message.shape.extend(tensor.shape)
    data = tensor.values.astype(FORMS[message.dtype]).tobytes()
    if tensor.csr is None:
        message.dense = data
    else:
        rows, columns = (one.astype("<i8").tobytes() for one in tensor.csr)
        sparse = message.sparse_csr
        sparse.values, sparse.crow_indices, sparse.col_indices = data, rows, columns


def packed(
    ids_NK: np.ndarray, weights_NK: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Moves each row's cells that are not 0 to the left, so that the computed arrays are narrow.

    After them one cell stands for all others of the row, target 0 with weight 0, whose
    log-probability they share. Returns targets and weights ``[N, k]``, and for each sent cell its
    column in the packed row, ``[N, K]`` int32, None if k is K: ``np.take_along_axis(.., 1)``
    unpacks results.
    """
    listed = (ids_NK != 0) | (weights_NK != 0)
    counts = listed.sum(axis=1, keepdims=True, dtype=np.int32)
    k = int(counts.max(initial=-1)) + 1
    if k >= listed.shape[1]:
        return ids_NK, weights_NK, None
    columns = np.cumsum(listed, axis=1, dtype=np.int32)
    columns -= 1
    np.copyto(columns, counts, where=~listed)
    rows, cells = np.nonzero(listed)
    ids_Nk = np.zeros((len(listed), k), ids_NK.dtype)
    weights_Nk = np.zeros((len(listed), k), weights_NK.dtype)
    for out, array in ((ids_Nk, ids_NK), (weights_Nk, weights_NK)):
        out[rows, columns[rows, cells]] = array[rows, cells]
    return ids_Nk, weights_Nk, columns
