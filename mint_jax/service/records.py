"""What the journal of futures holds, and how it looks as bytes.

::

    kind u8 | id 16 bytes | seq_id u64 | lengths of model and call u16 | digest 32 bytes
    model, call: UTF-8 | body: the rest

No record has a time: what a restart finds depends on no clock.
"""

import enum
import struct
from typing import NamedTuple

_FIXED = struct.Struct("<B16sQHH32s")
LONGEST_NAME = 1000  # bytes of a model's name, and of a call's
OVERHEAD = _FIXED.size + 2 * LONGEST_NAME  # bytes of a record beside its body, at most
_NOBODY = "0" * 32
_NO_DIGEST = "0" * 64


class Kind(enum.IntEnum):
    """What a record says; the numbers are part of the format.

    REQUEST: ``body`` was accepted as ``call`` number ``seq_id`` of ``model``, and has got ``id``.
    DONE: the request ended; ``body`` is its result.
    FAILED: it ended without effect; ``call`` is the category, ``body`` the error in UTF-8.
    DELIVERED: the result has arrived at the client.
    ACKNOWLEDGED: the client needs the result no more: it said so, or the time to keep it is over.
    FORGOTTEN: ``model`` and all that was asked of it are gone.
    CHECKPOINT: ``body`` is what is still to be known of requests whose own records may be deleted,
    JSON by model.
    """

    REQUEST = 1
    DONE = 2
    FAILED = 3
    DELIVERED = 4
    ACKNOWLEDGED = 5
    FORGOTTEN = 6
    CHECKPOINT = 7


class Record(NamedTuple):
    """One record; see ``Kind``. What a kind has no use for is left empty."""

    kind: Kind
    id: str = _NOBODY
    model: str = ""
    seq_id: int = 0
    call: str = ""
    digest: str = _NO_DIGEST
    body: bytes = b""


def encode(record: Record) -> bytes:
    """A record's bytes."""
    model, call = record.model.encode(), record.call.encode()
    return b"".join(
        (
            _FIXED.pack(
                record.kind,
                bytes.fromhex(record.id),
                record.seq_id,
                len(model),
                len(call),
                bytes.fromhex(record.digest),
            ),
            model,
            call,
            record.body,
        )
    )


def decode(payload: bytes) -> Record:
    """The record that ``encode`` made these bytes of.

    Raises:
        ValueError: they are none, say of a later version.
    """
    if len(payload) < _FIXED.size:
        raise ValueError(f"{len(payload)} bytes are no record")
    kind, id, seq_id, model_bytes, call_bytes, digest = _FIXED.unpack_from(payload)
    model_end = _FIXED.size + model_bytes
    call_end = model_end + call_bytes
    model, call = payload[_FIXED.size : model_end].decode(), payload[model_end:call_end].decode()
    return Record(Kind(kind), id.hex(), model, seq_id, call, digest.hex(), payload[call_end:])
