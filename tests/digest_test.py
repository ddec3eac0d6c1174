"""BLAKE3 against its published vectors, on one thread and many, for every kind of buffer."""

import numpy as np
import pytest

from mint_jax.digest import THREADED, blake3_alone, blake3_of

# of the first n numbers of 0, 1, ..., 250, 0, 1, ...: github.com/BLAKE3-team/BLAKE3
# test_vectors.json
PUBLISHED = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
}


@pytest.mark.parametrize("n", PUBLISHED)
def test_published_vectors(n):
    assert blake3_of(bytes(i % 251 for i in range(n))) == PUBLISHED[n]


def test_threads_and_kinds_of_buffers_change_nothing(rng):
    data = rng.integers(0, 256, THREADED + 12_345).astype(np.uint8)
    found = {
        blake3_of(x)
        for x in (
            data,
            data.tobytes(),
            bytearray(data),
            memoryview(data),
            data.view(np.uint8).reshape(1, -1),
        )
    }
    found |= {blake3_of(data, 1), blake3_of(data, 3), blake3_alone(data)}
    assert len(found) == 1
    data[-1] ^= 1
    assert blake3_of(data) not in found
