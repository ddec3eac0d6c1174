"""Estimates of the memory that a body takes once it is parsed, from its bytes.

A list in JSON has two characters and takes 64 bytes in Python; an empty protobuf message has two
bytes and takes 40. A limit of a body's bytes therefore bounds its memory only within a factor of
thirty. The constants are sizes of CPython 3.11's objects and of upb's messages. Estimates are upper
bounds; ``tests/service/weight_test.py`` measures by how much.
"""

from collections.abc import Mapping
from typing import Any

from mint_jax.errors import UserError
from mint_jax.service.bodies import TooLarge
from mint_jax.service.wire import messages

VALUES = 1 << 22  # of JSON in a body: eight times what Tinker's SDKs put into one
FIELDS = 1 << 20  # of protobuf: 25 times that
# bytes; a number is also read into an array or a tuple
_OBJECT, _LIST, _NUMBER, _KEY, _QUOTE = 200, 100, 96, 48, 32
# bytes of a protobuf field, and of a message of the outermost lists, which becomes a datum
_FIELD, _ROW = 128, 1024


_NUMBERS: Mapping[int, Any] = {-1: None}  # of a field of many numbers


def _fields(descriptor: Any) -> Mapping[int, Any]:
    """Returns the fields of a message that hold messages or many numbers: number -> the same table
    of the held message.
    """
    return {
        field.number: _fields(field.message_type) if field.message_type else _NUMBERS
        for field in descriptor.fields
        if field.message_type or field.is_repeated
    }


_INNER = _fields(messages.ForwardBackwardRequest.DESCRIPTOR)


def of_json(body: bytes) -> int:
    """Returns bytes that the parsed JSON takes, in addition to the body's own.

    Counts brackets and commas in strings too.

    Raises:
        TooLarge: it may have more than ``VALUES`` values.
    """
    objects, lists, commas, quotes = (body.count(mark) for mark in (b"{", b"[", b",", b'"'))
    if max(objects + lists + commas, quotes // 4) > VALUES:
        raise TooLarge(
            f"the JSON has more than {VALUES} values: send fewer in a request, or protobuf where"
            " the path takes it"
        )
    # Text of one character beyond ASCII may take four bytes for each of its characters, in the
    # decoded body and in the string.
    copies = 3 if body.isascii() and b"\\u" not in body else 9
    return (
        copies * len(body)
        + _OBJECT * objects
        + _LIST * lists
        + _NUMBER * commas
        + _KEY * body.count(b":")
        + _QUOTE * quotes
    )


def of_protobuf(body: bytes) -> int:
    """Returns bytes of the parsed message and its arrays, in addition to the body's own.

    Raises:
        TooLarge: it has more than ``FIELDS`` fields and numbers.
        UserError: the bytes are not such a message.
    """
    outermost = inner = _INNER
    count, rows, at, end = 0, 0, 0, len(body)
    # ends and fields of the messages around this one
    above: list[tuple[int, Mapping[int, Any]]] = []
    try:
        while at < end or above:
            if at == end:
                end, inner = above.pop()
                continue
            count += 1
            key, at = _varint(body, at)
            kind, form = inner.get(key >> 3), key & 7
            if form == 2:
                size, at = _varint(body, at)
                if kind is None or kind is _NUMBERS:
                    count += 0 if kind is None else size  # each byte may be a number
                    at += size
                else:
                    rows += inner is outermost
                    above.append((end, inner))
                    if at + size > end:
                        raise IndexError
                    end, inner = at + size, kind
            elif form == 0:
                _, at = _varint(body, at)
            elif form in (1, 5):
                at += 8 if form == 1 else 4
            else:
                raise UserError(
                    f"the body is no ForwardBackwardRequest (it has a field of wire type {form}):"
                    " send the message whole"
                )
            if at > end:
                raise IndexError
            if count > FIELDS:
                raise TooLarge(
                    f"the message has more than {FIELDS} fields: send fewer data in a request"
                )
    except IndexError:
        raise UserError(
            "the body is no ForwardBackwardRequest (it ends within a field): send the message whole"
        ) from None
    return 4 * len(body) + _FIELD * count + _ROW * rows


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at ``at``, and where it ends."""
    value = body[at]
    if value < 128:
        return value, at + 1
    value &= 127
    for i in range(1, 10):
        part = body[at + i]
        value |= (part & 127) << 7 * i
        if part < 128:
            return value, at + i + 1
    raise IndexError  # no number has more than ten bytes
