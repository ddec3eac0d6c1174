"""The digest of stored bytes: BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020), 256 bits, 64
hex digits.

Every load of a revision hashes all its bytes, and with SHA-256 that was two thirds of a load: 85 ms
of CPU for the 105 MB of a rank-1 adapter of Qwen3-30B-A3B, where BLAKE3 takes 19 (AVX2, one core).
It is a cryptographic hash of the same width, and a tree: one long message can be hashed by several
cores. SHA-256 is as fast only where the CPU has instructions for it and a library uses them.
"""

import numpy as np
from blake3 import blake3

THREADED = 1 << 20  # bytes from which waking other threads pays


def blake3_of(data: bytes | bytearray | memoryview | np.ndarray, threads: int | None = None) -> str:
    """64 hex digits of a contiguous buffer; lets other Python threads run meanwhile.

    Args:
        threads: for buffers of 1 MiB and more; None is one a core. The helpers are threads of the
            process with its own priority: a caller of low priority that shall stay out of the way
            takes 1.
    """
    view = data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else data
    if memoryview(view).nbytes < THREADED or threads == 1:
        return blake3(view).hexdigest()
    return blake3(view, max_threads=threads or blake3.AUTO).hexdigest()


def blake3_alone(data: bytes | bytearray | memoryview | np.ndarray) -> str:
    """``blake3_of`` in the calling thread alone."""
    return blake3_of(data, 1)
