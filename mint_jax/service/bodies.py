"""Bodies of requests: decompressed and parsed within bounds of bytes and depth."""

import io
import itertools
import json
import re
import zlib
from collections.abc import Callable
from typing import Any

import zstandard

from mint_jax.errors import UserError

DEPTH = 64  # of lists and objects in JSON; no request needs more than ten
WINDOW_BYTES = 8 << 20  # of zstd, what RFC 9659 allows in HTTP
FRAMES = 1000  # in a body; making a decompressor costs more than the few bytes of an empty frame
# compressed bytes at a time: a block of four gives 128 KiB, so that these give 8 MiB at most
_ZSTD_SLICE = 256
_GZIP_SLICE = 8 << 10  # gives 8 MiB too

# A string, whole or cut off. Nothing is tried twice (possessive), so that no body costs more than
# its length.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEPTHS = [1 if byte in b"[{" else -1 for byte in range(256)]
_HUGE = re.compile(rb"[eE]\+?\d{3}|\d{300}")  # where a number may be beyond float64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class TooLarge(UserError):
    """A body has more bytes than it may have."""


class UnknownCoding(UserError):
    """A body has a coding that is not known here."""


def decompress(
    body: bytes, coding: str, limit: int, hold: Callable[[int], None] = lambda count: None
) -> bytes:
    """Decompresses a body in steps, with at most ``limit`` and 16 MiB more in memory, whatever
    sizes its frames claim.

    Args:
        coding: ``zstd`` or ``gzip``; one or several frames.
        limit: bytes that it may have when decompressed.
        hold: called with the bytes of each step before the next; what it raises ends this.

    Raises:
        TooLarge: it has more.
        UnknownCoding: another coding.
        UserError: it is broken or cut off.
    """
    steps = {"zstd": (_zstd, _ZSTD_SLICE), "gzip": (_gzip, _GZIP_SLICE)}
    if coding not in steps:
        raise UnknownCoding(
            f"Content-Encoding is {coding!r}; send the body as zstd, gzip, or uncompressed"
        )
    start, size = steps[coding]
    # its value is not copied, as a joined list of parts would be
    whole, length, frames = io.BytesIO(), 0, 1
    frame: Any = start()
    try:
        for begin in range(0, len(body), size):
            piece = body[begin : begin + size]
            while piece:
                if frame.eof:
                    frame, frames = start(), frames + 1
                    if frames > FRAMES:
                        raise UserError(
                            f"the body has more than {FRAMES} frames of {coding}: compress it"
                            " as one"
                        )
                part = (
                    frame.decompress(piece, limit - length + 1)
                    if coding == "gzip"
                    else frame.decompress(piece)
                )
                length += len(part)
                if length > limit:
                    raise TooLarge(
                        f"the body has more than {limit} bytes when decompressed: send fewer data"
                        " in a request"
                    )
                hold(len(part))
                whole.write(part)
                piece = frame.unused_data if frame.eof else b""
    except (zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"the body is not whole {coding} ({error}): compress it again") from error
    if not frame.eof:
        raise UserError(f"the body ends within a frame of {coding}: send all of it")
    return whole.getvalue()


def _zstd():
    return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()


def _gzip():
    return zlib.decompressobj(wbits=31)


def depth_of(data: bytes) -> int:
    """Returns how deeply lists and objects of a JSON text nest, without parsing it."""
    # `sub` would take 177 bytes a string
    brackets = b"".join(_STRINGS.split(data)).translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(map(_DEPTHS.__getitem__, brackets)), default=0)


def parse_json(data: bytes, max_depth: int = DEPTH, finite: bool = True) -> object:
    """Returns the value of a JSON body.

    Args:
        finite: refuse ``NaN``, infinity and numbers beyond float64; else they are taken as Python
            writes and reads them.

    Raises:
        UserError: it is not UTF-8 or not JSON, nests deeper than ``max_depth``, or has halves of
            surrogate pairs; see also ``finite``.
    """
    if depth_of(data) > max_depth:  # before anything recurses
        raise UserError(
            f"the JSON nests deeper than {max_depth} lists and objects: send it flatter"
        )
    try:
        strict = (
            {"parse_constant": _refuse, "parse_float": _finite if _HUGE.search(data) else None}
            if finite
            else {}
        )
        value = json.loads(data.decode(), **strict)
        if _SURROGATE.search(data):
            _encode_texts(value)
    except UnicodeDecodeError as error:
        raise UserError(
            f"the body is not UTF-8 (byte {error.start}): send JSON in UTF-8"
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(
            "a string of the JSON has half of a surrogate pair: send whole characters"
        ) from error
    except UserError:
        raise
    except ValueError as error:  # also an integer of more than 4,300 digits
        raise UserError(f"the body is not JSON ({error}): check what was sent") from error
    return value


def _encode_texts(value: object) -> None:
    """Raises ``UnicodeEncodeError`` for a string that UTF-8 cannot write."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, list):
        for one in value:
            _encode_texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            key.encode()
            _encode_texts(one)


def _refuse(name: str) -> float:
    raise UserError(f"the JSON has {name}, which JSON has not: send finite numbers")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise UserError(
            f"the JSON has the number {text[:20]}, which is beyond float64: send finite numbers"
        )
    return value
