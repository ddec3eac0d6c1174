"""Estimates of a body's memory are bounds, and what has too many values is refused before anything
of it is built.
"""

import ctypes
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.service import weight
from mint_jax.service.bodies import TooLarge
from mint_jax.service.wire import messages
from tests.memory import assert_takes_at_most

COUNT = 50_000
PIECES = ["[]", "{}", '{"":0}', '{"a":{}}', "[[[[[[]]]]]]", "1.5", "257", '"ab"', '""', "true"]
PIECES += ['"\u65e5\u672c"', '{"a":1,"b":2}', "[0,0]", '{"aa":"bb"}', '"\\u65e5"', '"\U0001f600"']
PIECES += ["12345678901234567890", '"a\\ud83d\\ude00"', '"a\u00e9z"']


def keyed(count):
    return "{" + ",".join(f'"{i}":{i}' for i in range(count)) + "}"


def texts(unit):
    return json.dumps([unit * 100_000], ensure_ascii=False)


TEXTS = [
    *("[" + ",".join([piece] * COUNT) + "]" for piece in PIECES),
    *(keyed(COUNT), texts("a"), texts("a") + " ", texts("aaa\U0001f600"), texts("\u65e5")),
]


def measure():
    """Prints the estimate, the peak and the kept bytes of every text."""
    rows = []
    for text in TEXTS:
        body = text.encode()
        estimate = weight.of_json(body)
        tracemalloc.start()
        value = json.loads(body.decode())
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert value is not None
        rows.append([estimate, peak, kept])
    print(json.dumps(rows))


@pytest.fixture(scope="module")
def measured():
    """What ``measure`` prints, in a process without other threads: a thread that allocates while
    tracing begins or ends can crash Python 3.11, and XLA's do.
    """
    command = [sys.executable, "-c", "from tests.service import weight_test; weight_test.measure()"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(TEXTS)), ids=lambda i: TEXTS[i][:24])
def test_json_takes_no_more_than_was_estimated(measured, index):
    estimate, peak, kept = measured[index]
    assert peak <= estimate + 4096
    assert kept <= estimate


def test_too_many_values_are_refused_unread():
    half = weight.VALUES // 2
    for body in (
        b"[" * (weight.VALUES + 1),
        b"[" + b"[]," * half + b"[]]",
        b"{" + b'"":{},' * half + b"}",
        b'""' * (2 * weight.VALUES + 2),
    ):

        def refused(body=body):
            with pytest.raises(TooLarge, match=f"than {weight.VALUES} values"):
                weight.of_json(body)

        assert_takes_at_most(0, refused)
    assert weight.of_json(b"[" + b"0," * (weight.VALUES - 2) + b"0]") < 1 << 30


class Used(ctypes.Structure):
    """What glibc's ``mallinfo2`` gives."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (*(f"before{i}" for i in range(4)), "hblkhd", "a", "b", "uordblks", "c", "d")
    ]


def used():
    """Bytes that are allocated outside of Python's own pools."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = Used
    told = read()
    return told.uordblks + told.hblkhd


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number, body):
    return varint(number << 3 | 2) + varint(len(body)) + body


BOMBS = {
    "empty data": field(3, b"") * COUNT,
    "empty chunks": field(3, field(1, b"") * COUNT),
    "chunks of text": field(3, field(1, field(1, field(1, b"abcd"))) * COUNT),
    "spans": field(3, (field(3, field(1, b"")) + field(4, field(2, b""))) * COUNT),
    "tensors": field(
        3, b"".join(field(2, field(1, b"%d" % i) + field(2, field(1, b""))) for i in range(COUNT))
    ),
    "shapes": field(3, field(2, field(1, b"a") + field(2, field(4, b"\1" * COUNT)))),
    "shapes one by one": field(3, field(2, field(1, b"a") + field(2, b"\x20\1" * COUNT))),
    "options": b"".join(field(7, field(1, b"%d" % i)) for i in range(COUNT)),
    "unknown fields": field(99, b"") * COUNT,
    "one long chunk": field(3, field(1, field(1, field(1, b"a" * COUNT)))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_protobuf_takes_no_more_than_was_estimated(name):
    body, message = BOMBS[name], messages.ForwardBackwardRequest()
    estimate, before = weight.of_protobuf(body), used()
    message.ParseFromString(body)
    assert used() - before <= estimate + (1 << 16)  # blocks of upb's arena


def test_too_many_fields_are_refused_unread(monkeypatch):
    monkeypatch.setattr(weight, "FIELDS", COUNT)
    much = COUNT + 1
    for body in (
        field(3, b"") * much,
        field(3, field(1, b"") * much),
        field(3, field(2, field(2, field(4, b"\1" * much)))),
        field(9, b"") * much,
        b"\x10\1" * much,
    ):
        with pytest.raises(TooLarge, match=f"more than {COUNT} fields"):
            weight.of_protobuf(body)


def test_what_is_no_message_is_told():
    whole = BOMBS["chunks of text"][:100]
    for body in (
        whole,
        b"\x1a",
        b"\x1a\xff",
        b"\x1a\x05abc",
        b"\x1a" + b"\xff" * 11,
        b"\x0b\x0c",
        b"\x1a\x02\x0a\x05",
        b"\x09abc",
    ):
        with pytest.raises(UserError, match="message whole"):
            weight.of_protobuf(body)


def test_a_batch_of_the_sdk_weighs_little():
    """As many data as it puts into one request, of 1,024 tokens each."""
    request = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    for _ in range(1024):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.zeros(1024, "<i4").tobytes()
        for name in ("target_tokens", "advantages", "logprobs", "weights"):
            form = messages.INT64 if name == "target_tokens" else messages.FLOAT32
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = bytes(1024 * (8 if form == messages.INT64 else 4)), form
            tensor.shape.append(1024)
    body = request.SerializeToString()
    assert len(body) < weight.of_protobuf(body) < 6 * len(body)
