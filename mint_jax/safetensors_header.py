"""Headers of safetensors files (a u64 N and N bytes of JSON), read within a limit and parsed
strictly.
"""

import json
from typing import Any

from mint_jax.errors import UserError

_OTHER_FORMATS = [  # formats mistaken for weights, by first bytes
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


def header_size(head: bytes, size: int, most: int, what: str) -> int:
    """Returns N from a file's first 8 bytes.

    Args:
        size: size of the whole file, bytes.
        most: limit on N.
        what: name of the header in messages.

    Raises:
        UserError: the file has another format, is truncated, or N is too large.
    """
    if len(head) < 8:
        raise UserError(
            f"{what} is missing: the file has {size} bytes, which is less than the length of a"
            " header"
        )
    count = int.from_bytes(head[:8], "little")
    if count > min(size - 8, most):
        if (other := other_format(head)) is not None:
            raise UserError(f"{what} is missing: the file is {other}")
        raise UserError(
            f"{what} claims {count} bytes, the file has {size - 8} behind it and {most} are allowed"
        )
    return count


def other_format(head: bytes) -> str | None:
    """Returns the name of another file format by its first 8 bytes; None if unknown."""
    return next((what for start, what in _OTHER_FORMATS if head.startswith(start)), None)


def parse_json(text: bytes | str, what: str) -> Any:
    """Parses strict JSON: no NaN, no infinities, no repeated names.

    Raises:
        UserError: names ``what``.
    """

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
    except (
        ValueError
    ) as error:  # includes UnicodeDecodeError, JSONDecodeError and integers of thousands of digits
        raise UserError(f"{what} is not JSON ({str(error)[:100]})") from None


def parse_object(text: bytes | str, what: str) -> dict[str, Any]:
    """Parses a JSON object with ``parse_json``.

    Raises:
        UserError: names ``what``.
    """
    found = parse_json(text, what)
    if not isinstance(found, dict):
        raise UserError(f"{what} is not a JSON object")
    return found


def shown(name: object) -> str:
    """Returns an untrusted name, shortened and in printable characters."""
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
