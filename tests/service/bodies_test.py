"""Bodies within bounds of bytes and depth."""

import functools
import gzip
import multiprocessing

import pytest
import zstandard

from mint_jax.errors import UserError
from mint_jax.service.bodies import FRAMES, TooLarge, UnknownCoding, decompress, depth_of
from tests.memory import assert_takes_at_most

LIMIT = 1 << 20
FRESH = multiprocessing.get_context("forkserver")


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


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_what_was_compressed_comes_back(coding, rng):
    for size in (0, 1, 100, 70_000, LIMIT):
        data = rng.integers(0, 7, size, dtype="uint8").tobytes()
        assert decompress(packed(data, coding), coding, LIMIT) == data
    parts = [rng.bytes(1000), b"", b"0" * 100_000]
    assert decompress(b"".join(packed(part, coding) for part in parts), coding, LIMIT) == b"".join(
        parts
    )


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_bomb_costs_no_more_than_the_limit(coding):
    packer = zstandard.ZstdCompressor().compressobj() if coding == "zstd" else None
    zeros, bomb = bytes(1 << 24), b""
    if packer is None:
        bomb = gzip.compress(zeros) * 64  # a gigabyte in 64 members of a megabyte in all
    else:
        bomb = b"".join(packer.compress(zeros) for _ in range(64)) + packer.flush()
    del zeros
    assert len(bomb) < 2 << 20
    assert_fresh_process_takes(LIMIT + (64 << 20), bomb, coding)


def test_the_densest_frame_there_can_be():
    """Blocks of one repeated byte: four bytes give 128 KiB."""
    block = (128 << 10 << 3 | 1 << 1).to_bytes(3, "little") + b"0"
    # no length, a window of 128 KiB, no last block
    frame = bytes.fromhex("28b52ffd 00 38".replace(" ", "")) + block * 400
    assert len(decompress(frame[:-4] + (1).to_bytes(3, "little"), "zstd", 64 << 20)) == 399 * (
        128 << 10
    )
    assert_fresh_process_takes(LIMIT + (20 << 20), frame, "zstd")


def frame_of(claimed, data):
    """A zstd frame of one raw block that claims to have another length, and a window of 128 KiB."""
    return (
        bytes.fromhex("28b52ffdc038")
        + claimed.to_bytes(8, "little")
        + (len(data) << 3 | 1).to_bytes(3, "little")
        + data
    )


def test_what_a_frame_claims_of_its_length_costs_nothing():
    assert decompress(frame_of(100, b"0" * 100), "zstd", LIMIT) == b"0" * 100
    # one segment
    whole = (
        bytes.fromhex("28b52ffde0")
        + (1 << 50).to_bytes(8, "little")
        + (100 << 3 | 1).to_bytes(3, "little")
        + b"0" * 100
    )
    for bad in (
        frame_of(1 << 50, b"0" * 100),
        frame_of(2**64 - 2, b"0" * 100),
        frame_of(10, b"0" * 100),
        frame_of(0, b"0"),
        whole,
    ):
        assert_takes_at_most(0, lambda bad=bad: refused(bad, "zstd", UserError, "zstd"))


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_broken_frames_are_told(coding, rng):
    good = packed(rng.bytes(5000), coding)
    for bad in (
        b"",
        b"nothing of this kind",
        good[:-1],
        good[: len(good) // 2],
        good[:1],
        good + b"more",
        good + good[:-1],
    ):
        with pytest.raises(UserError) as raised:
            decompress(bad, coding, LIMIT)
        assert not isinstance(raised.value, TooLarge)
    flipped = bytearray(gzip.compress(b"text" * 1000))
    flipped[-6] ^= 1  # its checksum
    with pytest.raises(UserError, match="not whole gzip"):
        decompress(bytes(flipped), "gzip", LIMIT)
    with pytest.raises(UserError, match=f"more than {FRAMES} frames"):
        decompress(packed(b"", coding) * (FRAMES + 1), coding, LIMIT)


def test_other_codings_and_wide_windows_are_refused():
    for coding in ("br", "gzip, zstd", "GZIP"):
        with pytest.raises(UnknownCoding, match="send the body as zstd, gzip"):
            decompress(b"", coding, LIMIT)
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    with pytest.raises(UserError, match="not whole zstd"):
        decompress(packer.compress(b"0" * 100) + packer.flush(), "zstd", LIMIT)


def nested(depth, rng):
    """JSON of that depth, and strings with brackets, which count for nothing."""
    text = '"[[[{{\\"[["'
    for _ in range(depth):
        text = f"[{text}]" if rng.integers(2) else "".join(['{"]]":', text, "}"])
    return text.encode()


def test_depth_is_counted_exactly(rng):
    for depth in (0, 1, 7, 64, 5000):
        assert depth_of(nested(depth, rng)) == depth
    assert depth_of(b"[" * 5_000_000) == 5_000_000


@pytest.mark.parametrize("piece", [b'"', b'\\"', b'"\\', b"\\", b'"\\"', b'"a"', b"e", b"{}"])
def test_depth_is_counted_in_linear_time(piece):
    """A million bytes that would take hours if each began a new search to the end."""
    depth_of(b'"' + piece * (1_000_000 // len(piece)) + b"\\")
    depth_of(piece * (1_000_000 // len(piece)))
