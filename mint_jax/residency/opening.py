"""Residency as jobs open it: slots that hold what is to be loaded as it is stored, and loads that
use the machine.

Benches of loading call this too, with nothing of their own, so that they measure what a job does.
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
from mint_jax.residency.host_tier import Fetch, Unpack
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots

NICENESS = 10  # of the loaders' threads: decoding goes first
# of a large adapter at a time between two decode steps, a millisecond's work; each piece costs 0.1
# ms of its own
PIECE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Known:
    """What its record says of a revision before it is loaded.

    Attributes:
        dtype: of the stored factors.
        finite: all weights are, found when a catalog took them in.
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
    """Residency for given revisions, by digest.

    Slots have the dtype in which the revisions are stored (the narrowest that holds all of them
    without rounding): half the bytes to write where that has 16 bits, and sampling multiplies by
    the same numbers.

    Args:
        base: fingerprint of the base.
        slots: of each rank bucket, at most; there are no more than revisions.
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
