"""Values out of a request's JSON or protobuf, each checked for its type: whatever is not as it
should be is a ``UserError``.

``what`` names the value in a message, "datum 3: weights".
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mint_jax.errors import UserError
from mint_jax.service.bodies import parse_json

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: Any) -> str:
    """The value for a message, cut where it is long."""
    return _SHORT.repr(value)


def is_protobuf(content_type: str) -> bool:
    """Returns whether a body of this type is protobuf."""
    return content_type.partition(";")[0].strip().lower() in (
        "application/x-protobuf",
        "application/protobuf",
    )


def need_json(content_type: str) -> None:
    """Raises:
    UserError: a body of this type is no JSON.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise UserError(
            f"the content type is {shown(content_type)}; send application/json or"
            " application/x-protobuf"
        )


def json_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body. Numbers that are none are read: a request that has one has its
    place, and fails there.

    Raises:
        UserError: it is none, or nested so deeply that nothing of ours can be meant.
    """
    return mapping(parse_json(body, finite=False), "the body")


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{what} is {shown(value)}; expected an object")
    return value


def sequence(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise UserError(f"{what} is {shown(value)}; expected a list")
    return value


def text(value: Any, what: str) -> str:
    """A string that UTF-8 can write: JSON may have halves of characters."""
    if not isinstance(value, str) or not value:
        raise UserError(f"{what} is {shown(value)}; expected a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{what} is {shown(value)}; expected characters that UTF-8 has") from None
    return value


def boolean(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{what} is {shown(value)}; expected true or false")
    return value


def integer(value: Any, what: str, low: int = -(2**31), high: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{what} is {shown(value)}; expected a whole number, {low} to {high}")
    return value


def number(value: Any, what: str) -> float:
    """A finite number that float32 has room for."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not abs(value) <= float(np.finfo(np.float32).max)
    ):
        raise UserError(f"{what} is {shown(value)}; expected a finite number")
    return float(value)


def integers(value: Any, what: str) -> np.ndarray:
    """A list of whole numbers as int64 ``[n]``."""
    if set(map(type, sequence(value, what))) <= {int}:
        try:
            return np.array(value, np.int64)
        except OverflowError:
            pass
    raise UserError(f"{what} is {shown(value)}; expected a list of whole numbers of 64 bits")


def numbers(value: Any, what: str) -> np.ndarray:
    """A list of numbers as float64 ``[n]``."""
    if set(map(type, sequence(value, what))) <= {int, float}:
        try:
            return np.array(value, np.float64)
        except OverflowError:
            pass
    raise UserError(f"{what} is {shown(value)}; expected a list of numbers")


def as_int32(values: np.ndarray, what: str) -> np.ndarray:
    """Whole numbers in 32 bits.

    Raises:
        UserError: one has no room there.
    """
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        wrong = int(values.min() if values.min() < -(2**31) else values.max())
        raise UserError(f"{what} has {wrong}; expected token ids of this base")
    return values.astype(np.int32)


def raw(data: bytes, dtype: str, what: str) -> np.ndarray:
    """Bytes as a flat array of little-endian numbers, a view.

    Raises:
        UserError: they are not a whole number of them.
    """
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise UserError(
            f"{what} has {len(data)} bytes; expected a multiple of {size}, little-endian"
            f" {np.dtype(dtype).name}"
        )
    return np.frombuffer(data, dtype)


def json_tokens(value: Any, what: str) -> np.ndarray:
    """The text of ``{"chunks": [...]}``, int32 ``[N]``; a chunk without a type is text."""
    chunks = []
    for i, chunk in enumerate(sequence(mapping(value, what).get("chunks"), f"{what}.chunks")):
        kind = mapping(chunk, f"{what}.chunks[{i}]").get("type", "encoded_text")
        if kind != "encoded_text":
            raise not_text(kind, f"{what}.chunks[{i}]")
        chunks.append(as_int32(integers(chunk.get("tokens"), f"{what}.chunks[{i}].tokens"), what))
    return np.concatenate([np.zeros(0, np.int32), *chunks])


def proto_tokens(chunks: Any, what: str) -> np.ndarray:
    """The text of ``Chunk`` messages, int32 ``[N]``."""
    texts = []
    for i, chunk in enumerate(chunks):
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise not_text(kind, f"{what}.chunks[{i}]")
        texts.append(raw(chunk.encoded_text.tokens, "<i4", f"{what}.chunks[{i}].tokens"))
    return np.concatenate([np.zeros(0, np.int32), *texts])


def not_text(kind: Any, what: str) -> UserError:
    return UserError(
        f"{what} is of type {shown(kind)}; this base reads text alone: send chunks of type"
        " encoded_text"
    )


def shape_of(dims: Any, count: int, what: str) -> tuple[int, ...]:
    """A tensor's shape, one or two axes; where none is told, ``[count]``."""
    dims = list(dims)
    if not dims:
        return (count,)
    if len(dims) > 2 or any(
        isinstance(d, bool) or not isinstance(d, int) or not 0 <= d < 2**62 for d in dims
    ):
        raise UserError(f"{what} has shape {shown(dims)}; expected one or two axes, none below 0")
    return tuple(dims)


def volume(shape: tuple[int, ...]) -> int:
    """Cells of an array of this shape, however many."""
    return math.prod(shape)
