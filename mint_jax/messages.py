"""What process 0 tells the others while it alone decides: a word and some values, arrays among
them.

A message is the length of a JSON text, that text, and the bytes of the arrays, which the text
names. Plans are wide tables of which a few columns are used, the rest being one number: of an
array's last axis that end is sent as that one number, so that a plan is some kilobytes whatever the
context and the vocabulary.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mint_jax import multihost


def tell(word: str, *values: Any) -> None:
    """Sends a message; nothing in a single process."""
    if multihost.count() > 1:
        multihost.post(pack((word, *values)))


def hear(records: Mapping[str, type]) -> tuple[str, list[Any]]:
    """The next message that process 0 told.

    Args:
        records: the named tuples that may be in it, by name.
    """
    word, *values = unpack(multihost.take(), records)
    return word, values


def pack(value: Any) -> bytes:
    """A message of numbers, texts, None, arrays, and lists, tuples, named tuples and dicts of
    such.
    """
    parts: list[bytes] = []
    text = json.dumps(_described(value, parts)).encode()
    return b"".join((struct.pack("<I", len(text)), text, *parts))


def unpack(data: bytes, records: Mapping[str, type]) -> Any:
    """What ``pack`` made a message of, tuples as lists."""
    (length,) = struct.unpack_from("<I", data)
    value, at = json.loads(data[4 : 4 + length]), 4 + length

    def made(told: Any) -> Any:
        nonlocal at
        if not isinstance(told, dict):
            return [made(one) for one in told] if isinstance(told, list) else told
        if "pairs" in told:
            return {made(key): made(one) for key, one in told["pairs"]}
        if "record" in told:
            return records[told["record"]](*made(told["values"]))
        array = np.empty(told["shape"], jnp.dtype(told["dtype"]))
        if array.size:
            cut = (*array.shape[:-1], told["used"]) if array.ndim else (0,)
            count = math.prod(cut)
            held = np.frombuffer(data, array.dtype, count + 1, at)
            at += held.nbytes
            array[...] = held[-1]
            if array.ndim:
                array[..., : told["used"]] = held[:-1].reshape(cut)
        return array

    return made(value)


def _described(value: Any, parts: list[bytes]) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _array(np.asarray(value), parts)
    if isinstance(value, dict):
        return {
            "pairs": [
                [_described(key, parts), _described(one, parts)] for key, one in value.items()
            ]
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"record": type(value).__name__, "values": [_described(one, parts) for one in value]}
    return [_described(one, parts) for one in value] if isinstance(value, list | tuple) else value


def _array(x: np.ndarray, parts: list[bytes]) -> dict[str, Any]:
    told: dict[str, Any] = {"dtype": x.dtype.name, "shape": list(x.shape)}
    if not x.size:
        return told
    # -0 is not 0, and NaN is itself
    bits = np.ascontiguousarray(x).reshape(x.shape or (1,)).view(f"u{x.dtype.itemsize}")
    rest = bits.reshape(-1)[-1]
    differs = (bits != rest).any(axis=tuple(range(bits.ndim - 1)))
    used = int(np.flatnonzero(differs)[-1]) + 1 if differs.any() else 0
    parts += [bits[..., :used].tobytes(), rest.tobytes()]
    return told | {"used": used}
