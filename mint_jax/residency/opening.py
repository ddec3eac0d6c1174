"""Residency with the settings of jobs: slots in the stored dtype of the adapters, and loads on all
cores.
"""

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from mint_jax.lora.tree import AdapterConfig
from mint_jax.residency.admission import Admission
from mint_jax.residency.residency import Fetch, Residency, Unpack
from mint_jax.residency.slots import DeviceSlots

NICENESS = 10  # niceness of loader threads, so that decoding has priority
# Bytes of a large adapter written between two decode steps: about 1 ms, of which 0.1 ms is
# overhead.
PIECE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Known:
    """Facts about a revision that are known before it is loaded.

    Attributes:
        dtype: dtype of the stored factors.
        finite: all weights are finite, as found by the catalog on import.
    """

    config: AdapterConfig
    dtype: str
    finite: bool


def open_residency(
    fetch: Fetch,
    unpack: Unpack,
    base: str,
    base_specs: Any,
    revisions: Mapping[str, Known],
    slots: int,
    host_bytes: int,
    *,
    mesh: Mesh | None = None,
    depth: int = 256,
) -> Residency:
    """Opens residency for given revisions, by digest.

    Slots have the stored dtype of the revisions, promoted so that none is rounded. 16-bit slots
    halve the bytes to write, and sampling multiplies by the same numbers.

    Args:
        base: fingerprint of the base.
        slots: maximum slots of each rank bucket; there are no more than revisions.
        host_bytes, depth: see ``Residency``.
    """
    counts = Counter(known.config.bucket for known in revisions.values())
    targets = dict.fromkeys(
        target for known in revisions.values() for target in known.config.targets
    )
    dtype = functools.reduce(
        jnp.promote_types, (jnp.dtype(known.dtype) for known in revisions.values())
    )
    device = DeviceSlots(
        base_specs,
        {bucket: min(count, slots) for bucket, count in counts.items()},
        targets,
        dtype,
        mesh,
        PIECE_BYTES,
    )
    finite = {digest for digest, known in revisions.items() if known.finite}
    admission = Admission(
        base, base_specs, {bucket: device.targets(bucket) for bucket in counts}, finite
    )
    return Residency(
        fetch,
        unpack,
        admission,
        device,
        host_bytes,
        workers=os.cpu_count() or 1,
        depth=depth,
        niceness=NICENESS,
    )
