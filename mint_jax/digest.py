"""Digests of stored bytes: BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020), 64 hex digits.

Every load of a revision hashes all its bytes. SHA-256 took 85 ms for the 105 MB of a rank-1 adapter
of Qwen3-30B-A3B; BLAKE3 takes 19 ms (AVX2, one core), and several cores can hash one message.
"""

import numpy as np
from blake3 import blake3

THREADED = 1 << 20  # bytes above which threads pay off


def blake3_of(data: bytes | bytearray | memoryview | np.ndarray, threads: int | None = None) -> str:
    """Returns 64 hex digits of a contiguous buffer; releases the GIL. Buffers of 1 MiB and more
    take a thread per core, or ``threads``.
    """
    view = data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else data
    if memoryview(view).nbytes < THREADED or threads == 1:
        return blake3(view).hexdigest()
    return blake3(view, max_threads=threads or blake3.AUTO).hexdigest()


def blake3_alone(data: bytes | bytearray | memoryview | np.ndarray) -> str:
    """Returns ``blake3_of`` in the calling thread only, whose priority helpers would not have."""
    return blake3_of(data, 1)
