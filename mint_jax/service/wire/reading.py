"""Numbers and tokens of requests, checked for their types.

``what`` names the value in a message, "datum 3: weights".
"""

import reprlib
from typing import Any, Literal

import numpy as np

from mint_jax.errors import UserError
from mint_jax.service.validation import Body

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class Chunk(Body):
    """Text of a model's input. Items of ``tokens`` are validated as one array."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Any]


class ModelInput(Body):
    chunks: list[Chunk]

    def tokens(self, what: str) -> np.ndarray:
        """Returns the text's token ids, int32 ``[N]``."""
        chunks = [
            as_int32(integers(chunk.tokens, f"{what}.chunks[{i}].tokens"), what)
            for i, chunk in enumerate(self.chunks)
        ]
        return np.concatenate([np.zeros(0, np.int32), *chunks])


def shown(value: Any) -> str:
    """Returns a value for a message, cut where it is long."""
    return _SHORT.repr(value)


def is_protobuf(content_type: str) -> bool:
    """Returns whether a body of this type is protobuf."""
    return content_type.partition(";")[0].strip().lower() in (
        "application/x-protobuf",
        "application/protobuf",
    )


def need_json(content_type: str) -> None:
    """Raises ``UserError`` unless a body of this type is JSON."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise UserError(
            f"the content type is {shown(content_type)}; send application/json or"
            " application/x-protobuf"
        )


def number(value: Any, what: str) -> float:
    """Returns a finite number within float32."""
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not abs(value) <= float(np.finfo(np.float32).max):
        raise UserError(f"{what} is {shown(value)}; expected a finite number")
    return float(value)


def integers(values: list[Any], what: str) -> np.ndarray:
    """Returns whole numbers as int64 ``[n]``."""
    if set(map(type, values)) <= {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            pass
    raise UserError(f"{what} is {shown(values)}; expected a list of whole numbers of 64 bits")


def numbers(values: list[Any], what: str) -> np.ndarray:
    """Returns numbers as float64 ``[n]``."""
    if set(map(type, values)) <= {int, float}:
        try:
            return np.array(values, np.float64)
        except OverflowError:
            pass
    raise UserError(f"{what} is {shown(values)}; expected a list of numbers")


def as_int32(values: np.ndarray, what: str) -> np.ndarray:
    """Returns whole numbers as int32. Raises ``UserError`` if one needs more bits."""
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        wrong = int(values.min() if values.min() < -(2**31) else values.max())
        raise UserError(f"{what} has {wrong}; expected token ids of this base")
    return values.astype(np.int32)


def raw(data: bytes, dtype: str, what: str) -> np.ndarray:
    """Returns bytes as a flat array of little-endian numbers, a view.

    Raises:
        UserError: the length is not a multiple of a number's size.
    """
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise UserError(
            f"{what} has {len(data)} bytes; expected a multiple of {size}, little-endian"
            f" {np.dtype(dtype).name}"
        )
    return np.frombuffer(data, dtype)


def proto_tokens(chunks: Any, what: str) -> np.ndarray:
    """Returns the token ids of ``Chunk`` messages, int32 ``[N]``."""
    texts = []
    for i, chunk in enumerate(chunks):
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise UserError(
                f"{what}.chunks[{i}] is of type {shown(kind)}; this base reads text only: send"
                " chunks of type encoded_text"
            )
        texts.append(raw(chunk.encoded_text.tokens, "<i4", f"{what}.chunks[{i}].tokens"))
    return np.concatenate([np.zeros(0, np.int32), *texts])


def shape_of(dims: Any, count: int, what: str) -> tuple[int, ...]:
    """Returns a tensor's shape, one or two axes; ``[count]`` if none is given."""
    dims = list(dims)
    if not dims:
        return (count,)
    if len(dims) > 2 or any(type(d) is not int or not 0 <= d < 2**62 for d in dims):
        raise UserError(f"{what} has shape {shown(dims)}; expected one or two axes, none below 0")
    return tuple(dims)
