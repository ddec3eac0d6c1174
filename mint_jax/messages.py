"""Messages of process 0 to the other processes: a word and values, arrays among them.

A message is the length of a JSON text, that text, and the bytes of the arrays that the text names.
Plans are wide tables with few used columns, the rest being one number. That end of an array's last
axis is sent as one number, so a plan is some kilobytes whatever the context and vocabulary.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mint_jax import multihost


def send(word: str, *values: Any) -> None:
    """Sends a message; does nothing in a single process."""
    if multihost.count() > 1:
        multihost.post(pack((word, *values)))


def receive(records: Mapping[str, type]) -> tuple[str, list[Any]]:
    """Receives the next message; ``records``: named tuples that it may contain, by name."""
    word, *values = unpack(multihost.take(), records)
    return word, values


def pack(value: Any) -> bytes:
    """Encodes numbers, texts, None, arrays, and lists, tuples, named tuples and dicts of them."""
    parts: list[bytes] = []
    text = json.dumps(_described(value, parts)).encode()
    return b"".join((struct.pack("<I", len(text)), text, *parts))


def unpack(data: bytes, records: Mapping[str, type]) -> Any:
    """Decodes a message of ``pack``; tuples become lists."""
    (length,) = struct.unpack_from("<I", data)
    value, at = json.loads(data[4 : 4 + length]), 4 + length

    def decoded(encoded: Any) -> Any:
        nonlocal at
        if not isinstance(encoded, dict):
            return [decoded(one) for one in encoded] if isinstance(encoded, list) else encoded
        if "pairs" in encoded:
            return {decoded(key): decoded(one) for key, one in encoded["pairs"]}
        if "record" in encoded:
            return records[encoded["record"]](*decoded(encoded["values"]))
        array = np.empty(encoded["shape"], jnp.dtype(encoded["dtype"]))
        if array.size:
            cut = (*array.shape[:-1], encoded["used"]) if array.ndim else (0,)
            count = math.prod(cut)
            values = np.frombuffer(data, array.dtype, count + 1, at)
            at += values.nbytes
            array[...] = values[-1]
            if array.ndim:
                array[..., : encoded["used"]] = values[:-1].reshape(cut)
        return array

    return decoded(value)


def _described(value: Any, parts: list[bytes]) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _array(np.asarray(value), parts)
    if isinstance(value, dict):
        pairs = [[_described(key, parts), _described(one, parts)] for key, one in value.items()]
        return {"pairs": pairs}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"record": type(value).__name__, "values": [_described(one, parts) for one in value]}
    return [_described(one, parts) for one in value] if isinstance(value, list | tuple) else value


def _array(x: np.ndarray, parts: list[bytes]) -> dict[str, Any]:
    encoded: dict[str, Any] = {"dtype": x.dtype.name, "shape": list(x.shape)}
    if not x.size:
        return encoded
    # -0 is not 0, and NaN is itself
    bits = np.ascontiguousarray(x).reshape(x.shape or (1,)).view(f"u{x.dtype.itemsize}")
    rest = bits.reshape(-1)[-1]
    differs = (bits != rest).any(axis=tuple(range(bits.ndim - 1)))
    used = int(np.flatnonzero(differs)[-1]) + 1 if differs.any() else 0
    parts += [bits[..., :used].tobytes(), rest.tobytes()]
    return encoded | {"used": used}
