"""The header of a safetensors file, written aligned and read strictly.

The safetensors package aligns to 8 bytes only, copies every tensor and reports little about damage;
the tests compare every file with it. Arrays are ordered by the power of two, up to 64, that divides
their size, so that each is aligned to it. Malformed bytes raise ``UserError`` before more than the
header is allocated.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mint_jax.errors import UserError, choice
from mint_jax.safetensors_header import header_size, parse_object, shown

ALIGNMENT = 64
# a packed adapter has tens of arrays; parsing hostile JSON takes 25 times its size
MAX_HEADER = 1 << 20
MAX_DIMS = 8
MAX_NAME = 512
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
TAGS = {str(dtype): tag for tag, dtype in DTYPES.items()}  # "bfloat16" -> "BF16"
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


class TensorExtent(NamedTuple):
    """One array: bytes ``[begin, end)`` after the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the order in which arrays are stored: most aligned first, then by name."""
    return sorted(arrays, key=lambda name: (-math.gcd(arrays[name].nbytes, ALIGNMENT), name))


def write(arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """Returns the header of arrays stored in the order of ``layout``, a multiple of ``ALIGNMENT``
    long. Raises ``UserError`` for a name or a dtype that ``read`` would refuse.
    """
    fields: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name in layout(arrays):
        array = arrays[name]
        if str(array.dtype) not in TAGS:
            raise choice(f"dtype of {name}", str(array.dtype), TAGS)
        offsets = [begin, begin + array.nbytes]
        shape = list(array.shape)
        fields[name] = {"dtype": TAGS[str(array.dtype)], "shape": shape, "data_offsets": offsets}
        begin = offsets[1]
    _check_names(arrays)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise UserError(
            f"{len(arrays)} arrays need a header of {len(text)} bytes; at most {MAX_HEADER}: stack"
            " them, one per projection"
        )
    return len(text).to_bytes(8, "little") + text


def read(data: np.ndarray) -> tuple[dict[str, str], dict[str, TensorExtent], int]:
    """Returns metadata, tensors by name, and the start of the data, from a whole file's bytes.
    Raises ``UserError``: the bytes are not exactly one safetensors file of known dtypes and
    harmless names.
    """
    size = header_size(data[:8].tobytes(), data.size, MAX_HEADER, "its header")
    fields = parse_object(data[8 : 8 + size].tobytes(), "its header")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise UserError("its metadata is not a JSON object of strings")
    tensors = {name: _tensor(name, entry) for name, entry in fields.items()}
    _check_names(tensors)
    _check_extents(tensors, data.size - 8 - size)
    return metadata, tensors, 8 + size


def is_size(value: object) -> bool:
    """True for an integer of 0 to 2^63 - 1, not for a bool."""
    return type(value) is int and 0 <= value < 1 << 63


def _tensor(name: str, entry: Any) -> TensorExtent:
    where = f"array {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where} is not described by exactly dtype, shape and data_offsets")
    tag, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(tag, str) or tag not in DTYPES:
        raise UserError(f"{where} has dtype {shown(tag)}; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise UserError(f"{where} has shape {shown(shape)}; expected at most {MAX_DIMS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise UserError(f"{where} has offsets {shown(offsets)}; expected [begin, end]")
    return TensorExtent(DTYPES[tag], tuple(shape), *offsets)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_size, value))


def _check_names(names: Mapping[str, object]) -> None:
    """Checks that names are relative paths of plain segments, and none is the folder of another."""
    folders = set()
    for name in names:
        segments = name.split("/")
        if len(name) > MAX_NAME or not all(_SEGMENT.fullmatch(segment) for segment in segments):
            raise UserError(
                f"array name {shown(name)} is not a path of letters, digits and _ - . like"
                " dense/attn/q/a"
            )
        folders |= {"/".join(segments[:i]) for i in range(1, len(segments))}
    if clash := folders & names.keys():
        raise UserError(f"{shown(min(clash))} is an array and a folder of arrays at once")


def _check_extents(tensors: dict[str, TensorExtent], size: int) -> None:
    """Checks that the tensors cover the data exactly: no gap, no overlap, nothing outside."""
    at = 0
    for name, (dtype, shape, begin, end) in sorted(tensors.items(), key=lambda one: one[1][2:]):
        needed = math.prod(shape) * dtype.itemsize  # Python's integers do not overflow
        if (begin, end) != (at, at + needed):
            raise UserError(
                f"array {shown(name)} of shape {shown(shape)} is at bytes {begin} to {end}; it"
                f" needs {needed} bytes, and the array before it ends at {at}"
            )
        if end > size:
            raise UserError(f"array {shown(name)} ends at byte {end} of {size}: it is cut off")
        at = end
    if at != size:
        raise UserError(f"its arrays end at byte {at}, its data at {size}")
