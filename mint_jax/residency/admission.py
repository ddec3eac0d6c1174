"""What must hold before an adapter may take a slot: its bytes are those its name says, and it fits
base and slots (law 9).
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
    """Refuses bytes that are not the revision's.

    Raises:
        UserError: naming both digests.
    """
    found = digest_of(buffer)
    if found != digest:
        raise UserError(
            f"revision {digest[:12]} is corrupt: the {buffer.nbytes} bytes that came from storage"
            f" have digest {found[:12]}; verify the catalog, then export or import the revision"
            " again"
        )


def modules_of(adapter: Any) -> int:
    """How many modules an adapter's factors are for, one per projection, layer and expert."""
    return sum(
        math.prod(np.shape(leaf)[:-2])
        for path, leaf in params_lib.leaves_with_path(adapter)
        if path.endswith("/a")
    )


class Admission:
    """The checks of one base and its slots.

    Args:
        base: fingerprint of the base.
        base_specs: its ``ParamSpec`` tree.
        held: per rank bucket the paths of the projections that its slots hold.
        finite: digests of revisions whose numbers a catalog looked at when it took them in, and
            found finite: the digest, which every load verifies, says that they are the same. Of
            others every number is looked at.
    """

    def __init__(
        self, base: str, base_specs: Any, held: Mapping[int, set[str]], finite: Container[str] = ()
    ):
        self.base, self.base_specs, self.held, self.finite = base, base_specs, dict(held), finite

    def bucket(self, rank: int) -> int | None:
        """The smallest rank bucket that there are slots of for adapters of a rank; None where all
        are too small.
        """
        return min((bucket for bucket in self.held if bucket >= rank), default=None)

    def check(self, digest: str, adapter: Any, schema: Any) -> int:
        """Whether an unpacked adapter may take a slot.

        Args:
            schema: has ``base``, a fingerprint, and ``config``, an ``AdapterConfig``.

        Returns:
            How many modules bind.

        Raises:
            UserError: base, layout, targets, rank, shapes or values; with the first that is wrong.
        """
        what, config = f"revision {digest[:12]}", schema.config
        if schema.base != self.base:
            raise UserError(
                f"{what} was trained on base {schema.base[:12]}, this is {self.base[:12]}: load it"
                " where its own base is"
            )
        bucket = self.bucket(config.rank)
        if bucket is None:
            have = ", ".join(map(str, sorted(self.held))) or "none"
            raise UserError(
                f"{what} has rank {config.rank}; there are slots for rank buckets {have}: configure"
                f" some for {config.bucket}"
            )
        for path, leaf in params_lib.leaves_with_path(adapter):
            if np.asarray(leaf).dtype.name not in DTYPES:
                raise UserError(
                    f"{what}: {path} is stored as {np.asarray(leaf).dtype.name}; expected one of"
                    f" {', '.join(DTYPES)}"
                )
        bound = lora_tree.check_fits(
            adapter, config, self.base_specs, what, digest not in self.finite
        )
        paths = {path.rsplit("/", 1)[0] for path, _ in params_lib.leaves_with_path(adapter)}
        if homeless := sorted(paths - self.held[bucket]):
            raise UserError(
                f"{what} adapts {homeless[0]}, which the slots do not hold: configure it among"
                " their targets"
            )
        if not bound:
            raise UserError(f"{what}: no module binds; the adapter is empty")
        return bound
