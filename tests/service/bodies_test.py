"""Bodies within bounds: of bytes and depth, and of the memory that parsed values take."""

import functools
import gzip
import json
import multiprocessing

import numpy as np
import pytest
import zstandard

from mint_jax.errors import UserError
from mint_jax.service import bodies
from mint_jax.service.bodies import FRAMES, TooLarge, UnknownCoding, decompress, depth_of
from mint_jax.service.wire import messages
from tests.memory import assert_takes_at_most

LIMIT = 1 << 20
FRESH = multiprocessing.get_context("forkserver")
by_coding = pytest.mark.parametrize("coding", ["gzip", "zstd"])


def packed(data, coding):
    return gzip.compress(data, 6) if coding == "gzip" else zstandard.compress(data)


def refused(body, coding, error, match=None):
    with pytest.raises(error, match=match):
        decompress(body, coding, LIMIT)


def assert_fresh_process_takes(limit, body, coding):
    """A body is refused with at most ``limit`` bytes. A fork of a process that has run a thousand
    tests took 80 MB more for the same pieces of 128 KiB, whose heap was in holes.
    """
    call = functools.partial(refused, body, coding, TooLarge)
    process = FRESH.Process(target=assert_takes_at_most, args=(limit, call))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@by_coding
def test_what_was_compressed_comes_back(coding, rng):
    for size in (0, 1, 70_000, LIMIT):
        data = rng.integers(0, 7, size, dtype="uint8").tobytes()
        assert decompress(packed(data, coding), coding, LIMIT) == data
    parts = [rng.bytes(1000), b"", b"0" * 100_000]
    frames = b"".join(packed(part, coding) for part in parts)
    assert decompress(frames, coding, LIMIT) == b"".join(parts)


@by_coding
def test_a_bomb_costs_no_more_than_the_limit(coding):
    """A gigabyte of zeros in a megabyte."""
    zeros = bytes(1 << 24)
    if coding == "gzip":
        bomb = gzip.compress(zeros) * 64
    else:
        packer = zstandard.ZstdCompressor().compressobj()
        bomb = b"".join(packer.compress(zeros) for _ in range(64)) + packer.flush()
    del zeros
    assert len(bomb) < 2 << 20
    assert_fresh_process_takes(LIMIT + (64 << 20), bomb, coding)


def test_the_densest_frame_there_can_be():
    """Blocks of one repeated byte: four bytes give 128 KiB."""
    block = (128 << 10 << 3 | 1 << 1).to_bytes(3, "little") + b"0"
    # no length, a window of 128 KiB, no last block
    frame = bytes.fromhex("28b52ffd0038") + block * 400
    assert_fresh_process_takes(LIMIT + (20 << 20), frame, "zstd")


@pytest.mark.parametrize("claimed", [1 << 50, 2**64 - 2, 10, 0])
def test_what_a_frame_claims_of_its_length_costs_nothing(claimed):
    """A frame of one raw block of 100 bytes, and a window of 128 KiB."""

    def frame(length):
        head = bytes.fromhex("28b52ffdc038") + length.to_bytes(8, "little")
        return head + (100 << 3 | 1).to_bytes(3, "little") + b"0" * 100

    assert decompress(frame(100), "zstd", LIMIT) == b"0" * 100
    assert_takes_at_most(0, lambda: refused(frame(claimed), "zstd", UserError, "zstd"))


@by_coding
def test_broken_frames_are_told(coding, rng):
    good = packed(rng.bytes(5000), coding)
    for bad in (b"", b"nothing of this kind", good[:-1], good[:1], good + b"more"):
        with pytest.raises(UserError) as raised:
            decompress(bad, coding, LIMIT)
        assert not isinstance(raised.value, TooLarge)
    refused(packed(b"", coding) * (FRAMES + 1), coding, UserError, f"more than {FRAMES} frames")


def test_other_codings_and_wide_windows_are_refused():
    for coding in ("br", "gzip, zstd", "GZIP"):
        refused(b"", coding, UnknownCoding, "send zstd, gzip")
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    refused(packer.compress(b"0" * 100) + packer.flush(), "zstd", UserError, "not whole zstd")


def nested(depth, rng):
    """JSON of that depth, and strings with brackets, which count for nothing."""
    text = '"[[[{{\\"[["'
    for _ in range(depth):
        text = f"[{text}]" if rng.integers(2) else "".join(['{"]]":', text, "}"])
    return text.encode()


def test_depth_is_counted_exactly(rng):
    for depth in (0, 1, 7, 64, 5000):
        assert depth_of(nested(depth, rng)) == depth


@pytest.mark.parametrize("piece", [b'"', b'\\"', b'"\\', b"\\", b'"\\"', b'"a"', b"{}"])
def test_depth_is_counted_in_linear_time(piece):
    """A million bytes that would take hours if each began a new search to the end."""
    depth_of(b'"' + piece * (1_000_000 // len(piece)) + b"\\")
    depth_of(piece * (1_000_000 // len(piece)))


# -- memory of JSON and protobuf

COUNT = 200_000
PIECES = ["[]", "{}", '{"":0}', '{"a":{}}', "[[[[[[]]]]]]", "1.5", "257", '"ab"', '""', "true"]
PIECES += ['"\u65e5\u672c"', '{"a":1,"b":2}', "[0,0]", '{"aa":"bb"}', '"\\u65e5"', '"\U0001f600"']
PIECES += ["12345678901234567890", '"a\\ud83d\\ude00"', '"a\u00e9z"']
TEXTS = {piece: f"[{','.join([piece] * COUNT)}]" for piece in PIECES}
TEXTS["an object"] = "{" + ",".join(f'"{i}":{i}' for i in range(COUNT)) + "}"
TEXTS |= {unit: f'["{unit * COUNT}"]' for unit in ("a", "aaa\U0001f600", "\u65e5")}


@pytest.mark.parametrize("name", TEXTS)
def test_json_takes_no_more_than_was_estimated(name):
    body = TEXTS[name].encode()
    assert_takes_at_most(bodies.json_memory(body), lambda: json.loads(body.decode()))


def test_too_many_values_are_refused_unread():
    half = bodies.VALUES // 2
    lists = b"[" + b"[]," * half + b"[]]"
    for body in (b"[" * (bodies.VALUES + 1), lists, b'""' * (2 * bodies.VALUES + 2)):

        def refuse(body=body):
            with pytest.raises(TooLarge, match=f"than {bodies.VALUES} values"):
                bodies.json_memory(body)

        assert_takes_at_most(0, refuse)
    assert bodies.json_memory(b"[" + b"0," * (bodies.VALUES - 2) + b"0]") < 1 << 30


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
    "unknown fields of chunks": field(3, field(1, field(1, field(99, b"") * COUNT))),
    "one long chunk": field(3, field(1, field(1, field(1, b"a" * COUNT)))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_protobuf_takes_no_more_than_was_estimated(name):
    body, message = BOMBS[name], messages.ForwardBackwardRequest()
    assert_takes_at_most(bodies.protobuf_memory(body), lambda: message.ParseFromString(body))


def test_too_many_fields_are_refused_unread(monkeypatch):
    monkeypatch.setattr(bodies, "FIELDS", COUNT)
    much = COUNT + 1
    numbers = field(3, field(2, field(2, field(4, b"\1" * much))))
    for body in (field(3, b"") * much, field(3, field(1, b"") * much), numbers, b"\x10\1" * much):
        with pytest.raises(TooLarge, match=f"more than {COUNT} fields"):
            bodies.protobuf_memory(body)


def test_what_is_no_message_is_told():
    whole = BOMBS["chunks of text"][:100]
    broken = (b"\x1a", b"\x1a\x05abc", b"\x1a" + b"\xff" * 11, b"\x0b\x0c", b"\x1a\x02\x0a\x05")
    for body in (whole, *broken, b"\x09abc"):
        with pytest.raises(UserError, match="message whole"):
            bodies.protobuf_memory(body)


def test_a_batch_of_the_sdk_takes_little():
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
    assert len(body) < bodies.protobuf_memory(body) < 6 * len(body)
