"""Headers of safetensors files (a u64 N and N bytes of JSON), read within a limit and parsed
strictly.
"""

import json
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError

MOST = 100_000_000  # bytes; the limit of the safetensors package
_PICKLE = "a pickle, which can run code when it is read"
_OTHER_FORMATS = {  # formats mistaken for weights, by first bytes
    b"PK\x03\x04": "a zip archive (PyTorch's format, which can run code when it is read)",
    b"PK\x05\x06": "an empty zip archive",
    **{bytes([0x80, protocol]): _PICKLE for protocol in (2, 3, 4, 5)},
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"GGUF": "a GGUF file",
    b"\x93NUMPY": "a numpy file",
    b"\x89HDF": "an HDF5 file",
}


def read_header(path: Path, most: int = MOST, what: str = "") -> tuple[dict[str, Any], int]:
    """Returns a file's header, at most ``most`` bytes, and where its data start. Errors name
    ``what``, or else the file.
    """
    what = what or f"the header of {path}"
    with open(path, "rb") as file:
        size = header_size(file.read(8), path.stat().st_size, most, what)
        return parse_object(file.read(size), what), 8 + size


def header_size(head: bytes, size: int, most: int, what: str) -> int:
    """Returns N, at most ``most``, from the first 8 bytes of a file of ``size`` bytes. Raises
    ``UserError``, which names ``what``.
    """
    if len(head) < 8:
        raise UserError(f"{what} is missing: the file has {size} bytes, and a header at least 8")
    count = int.from_bytes(head[:8], "little")
    if count > min(size - 8, most):
        for start, other in _OTHER_FORMATS.items():
            if head.startswith(start):
                raise UserError(f"{what} is missing: the file is {other}")
        raise UserError(
            f"{what} claims {count} bytes, the file has {size - 8} behind it and {most} are allowed"
        )
    return count


def parse_json(text: bytes | str, what: str) -> Any:
    """Parses strict JSON: no NaN, no infinities, no repeated names. Errors name ``what``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{what} names {shown(twice)} twice")
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
    except ValueError as error:  # of unicode, of JSON, and of integers of thousands of digits
        raise UserError(f"{what} is not JSON ({str(error)[:100]})") from None


def parse_object(text: bytes | str, what: str) -> dict[str, Any]:
    """Parses a JSON object with ``parse_json``."""
    found = parse_json(text, what)
    if not isinstance(found, dict):
        raise UserError(f"{what} is not a JSON object")
    return found


def shown(name: object) -> str:
    """Returns an untrusted name, shortened and in printable characters."""
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
