"""The header of a safetensors file, written aligned and read strictly.

A safetensors file is a u64 N, N bytes of JSON and the tensors' bytes without a gap. The safetensors package writes no
alignment beyond 8 bytes, reads only by copying every tensor, and says little about what is wrong with a damaged file,
so the header is handled here; the tests hold every file against the package.

Written: the data begins at a multiple of 64 bytes. Tensors cannot have gaps between them, so they are ordered by how
much of 64 divides their size: an array starts at a multiple of 64 when its size and those before it are multiples of
64 (every factor of a real model is), and otherwise at a multiple of whatever power of two divides its own size.

Read: whatever a stranger may have put in the bytes ends in a ``UserError`` that says what is wrong, before anything
larger than the header (at most ``MAX_HEADER``) is allocated.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mint_jax.errors import UserError, choice

ALIGNMENT = 64
MAX_HEADER = 1 << 20  # a packed adapter has tens of arrays; parsing hostile JSON costs some 25 times its size
MAX_DIMS = 8
MAX_NAME = 512
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
TAGS = {str(dtype): tag for tag, dtype in DTYPES.items()}  # "bfloat16" -> "BF16"
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_OTHERS = [  # formats that people hold for weights, by how they begin
    (b"PK\x03\x04", "a zip archive (PyTorch's format, which can run code when it is read)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x80\x02", "a pickle, which can run code when it is read"),
    (b"\x80\x03", "a pickle, which can run code when it is read"),
    (b"\x80\x04", "a pickle, which can run code when it is read"),
    (b"\x80\x05", "a pickle, which can run code when it is read"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"GGUF", "a GGUF file"),
    (b"\x93NUMPY", "a numpy file"),
    (b"\x89HDF", "an HDF5 file"),
]


class Tensor(NamedTuple):
    """Where one array lies: bytes ``[begin, end)`` behind the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """The order in which arrays are stored: most aligned first, then by name."""
    return sorted(arrays, key=lambda name: (-math.gcd(arrays[name].nbytes, ALIGNMENT), name))


def write(arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """The header of arrays stored in the order of ``layout``; its length is a multiple of ``ALIGNMENT``.

    Raises:
        UserError: a name or a dtype that ``read`` would refuse.
    """
    fields: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name in layout(arrays):
        array = arrays[name]
        if str(array.dtype) not in TAGS:
            raise choice(f"dtype of {name}", str(array.dtype), TAGS)
        end = begin + array.nbytes
        fields[name] = {"dtype": TAGS[str(array.dtype)], "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    _check_names(arrays)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise UserError(f"{len(arrays)} arrays need a header of {len(text)} bytes; at most {MAX_HEADER}: stack them, one per projection")
    return len(text).to_bytes(8, "little") + text


def read(data: np.ndarray) -> tuple[dict[str, str], dict[str, Tensor], int]:
    """Metadata, tensors by name and where the data begins, from the uint8 bytes of a whole file.

    Raises:
        UserError: the bytes are not exactly one safetensors file of known dtypes and harmless names.
    """
    if data.size < 8:
        raise UserError(f"it has {data.size} bytes, which is less than the length of a header")
    head = data[:8].tobytes()
    size = int.from_bytes(head, "little")
    if size > min(data.size - 8, MAX_HEADER):
        if (what := other_format(head)) is not None:
            raise UserError(f"it is {what}")
        raise UserError(f"its header claims {size} bytes, the file has {data.size - 8} behind it and {MAX_HEADER} are allowed")
    fields = parse_json(data[8 : 8 + size].tobytes(), "its header")
    if not isinstance(fields, dict):
        raise UserError("its header is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError("its metadata is not a JSON object of strings")
    tensors = {name: _tensor(name, entry) for name, entry in fields.items()}
    _check_names(tensors)
    _check_extents(tensors, data.size - 8 - size)
    return metadata, tensors, 8 + size


def other_format(head: bytes) -> str | None:
    """What a file that is no safetensors file is, in words, by its first 8 bytes; None where that is unknown."""
    return next((what for start, what in _OTHERS if head.startswith(start)), None)


def parse_json(text: bytes | str, what: str) -> Any:
    """JSON without what JSON does not have (NaN, infinities) and without a name given twice.

    Raises:
        UserError: naming ``what``.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{what} names {_shown(twice)} twice")
        return found

    def refuse(constant: str) -> Any:
        raise UserError(f"{what} has {constant}, which is not JSON")

    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{what} is nested too deeply") from None
    except ValueError as error:  # includes UnicodeDecodeError, JSONDecodeError and integers of thousands of digits
        raise UserError(f"{what} is not JSON ({str(error)[:100]})") from None


def is_size(value: object) -> bool:
    """Whether it is an integer that fits in 63 bits and is not negative (``True`` is none)."""
    return type(value) is int and 0 <= value < 1 << 63


def _shown(name: object) -> str:
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _tensor(name: str, entry: Any) -> Tensor:
    where = f"array {_shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where} is not described by exactly dtype, shape and data_offsets")
    tag, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(tag, str) or tag not in DTYPES:
        raise UserError(f"{where} has dtype {_shown(tag)}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(is_size, shape)):
        raise UserError(f"{where} has shape {_shown(shape)}; expected at most {MAX_DIMS} sizes that are not negative")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)) or offsets[0] > offsets[1]:
        raise UserError(f"{where} has offsets {_shown(offsets)}; expected [begin, end]")
    needed = math.prod(shape) * DTYPES[tag].itemsize  # Python's integers do not overflow
    if needed != offsets[1] - offsets[0]:
        raise UserError(f"{where} of shape {_shown(shape)} needs {needed} bytes; its offsets give {offsets[1] - offsets[0]}")
    return Tensor(DTYPES[tag], tuple(shape), offsets[0], offsets[1])


def _check_names(names: Mapping[str, object]) -> None:
    """Names are relative paths of plain segments, and none of them is the folder of another."""
    folders = set()
    for name in names:
        segments = name.split("/")
        if len(name) > MAX_NAME or not all(_SEGMENT.fullmatch(segment) for segment in segments):
            raise UserError(f"array name {_shown(name)} is not a path of letters, digits and _ - . like dense/attn/q/a")
        folders |= {"/".join(segments[:i]) for i in range(1, len(segments))}
    if clash := folders & names.keys():
        raise UserError(f"{_shown(min(clash))} is an array and a folder of arrays at once")


def _check_extents(tensors: dict[str, Tensor], size: int) -> None:
    """The tensors cover the data exactly: no gap, no overlap, nothing outside."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.end > size:
            raise UserError(f"array {_shown(name)} ends at byte {tensor.end} of {size}: the file is cut off, or its header wrong")
        if tensor.begin != end:
            kind = "overlaps the array before it" if tensor.begin < end else "leaves a gap before it"
            raise UserError(f"array {_shown(name)} begins at byte {tensor.begin}, expected {end}: it {kind}")
        end = tensor.end
    if end != size:
        raise UserError(f"its arrays end at byte {end}, its data at {size}")
