"""Checks of adapters before they get a slot: the digest of the bytes, and the fit to base and slots
(law 9).
"""

import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from mint_jax import params as params_lib
from mint_jax.digest import blake3_alone
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree

DTYPES = ("float32", "bfloat16", "float16")


def verify(
    digest: str, buffer: np.ndarray, digest_of: Callable[[np.ndarray], str] = blake3_alone
) -> None:
    """Raises ``UserError`` if bytes do not have the revision's digest."""
    found = digest_of(buffer)
    if found != digest:
        raise UserError(
            f"revision {digest[:12]} is corrupt: the {buffer.nbytes} bytes that came from storage"
            f" have digest {found[:12]}; verify the catalog, then export or import the revision"
            " again"
        )


def modules_of(adapter: Any) -> int:
    """Returns the number of an adapter's modules, one per projection, layer and expert."""
    counts: dict[str, int] = {}
    for path, leaf in params_lib.leaves_with_path(adapter):
        # A factor that experts share is one of the layer's modules.
        owner, count = path.rpartition("/")[0], math.prod(np.shape(leaf)[:-2])
        counts[owner] = max(count, counts.get(owner, 0))
    return sum(counts.values())


class Admission:
    """The checks of one base and its slots, which have room for the ``projections`` of each rank
    bucket. Digests in ``finite`` were checked for NaN on import.
    """

    def __init__(
        self,
        base: str,
        base_specs: Any,
        projections: Mapping[int, set[str]],
        finite: Container[str] = (),
    ):
        self.base, self.base_specs = base, base_specs
        self.projections, self.finite = dict(projections), finite

    def bucket(self, rank: int) -> int | None:
        """Returns the smallest rank bucket with slots for a rank; None if all are too small."""
        return lora_tree.bucket_for(rank, self.projections)

    def check(self, digest: str, adapter: Any, schema: Any) -> int:
        """Returns the number of modules that bind. Raises ``UserError`` for the first mismatch of
        base, layout, targets, rank, shapes or values with a schema's ``base`` and ``config``.
        """
        what, config = f"revision {digest[:12]}", schema.config
        if schema.base != self.base:
            raise UserError(
                f"{what} was trained on base {schema.base[:12]}, this is {self.base[:12]}: load it"
                " on its own base"
            )
        bucket = self.bucket(config.rank)
        if bucket is None:
            have = ", ".join(map(str, sorted(self.projections))) or "none"
            raise UserError(
                f"{what} has {config.size}; there are slots for rank buckets {have}: configure"
                f" some for {config.bucket}"
            )
        for path, leaf in params_lib.leaves_with_path(adapter):
            if (dtype := np.asarray(leaf).dtype.name) not in DTYPES:
                expected = ", ".join(DTYPES)
                raise UserError(f"{what}: {path} is stored as {dtype}; expected one of {expected}")
        bound = lora_tree.check_fits(
            adapter, config, self.base_specs, what, digest not in self.finite
        )
        paths = {path.rsplit("/", 1)[0] for path, _ in params_lib.leaves_with_path(adapter)}
        if missing := sorted(paths - self.projections[bucket]):
            raise UserError(
                f"{what} adapts {missing[0]}, for which the slots have no room: add it to their"
                " targets"
            )
        if not bound:
            raise UserError(f"{what}: no module binds; the adapter is empty")
        return bound
