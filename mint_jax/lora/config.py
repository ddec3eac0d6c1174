"""Configuration of an adapter. Imports no jax: the catalog reads it for a million adapters."""

import dataclasses

from mint_jax.errors import UserError
from mint_jax.fields import Settings, setting

MAX_RANK = 1024
LINEAR_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True, repr=False)
class AdapterConfig(Settings):
    """Shape and scale of an adapter."""

    rank: int = setting("number of rows R of A and of columns of B, at least 1")
    alpha: float = setting(
        "numerator of the scale: the delta is alpha / rank * B A x, or alpha / sqrt(rank) with "
        "rslora",
        16.0,
    )
    targets: tuple[str, ...] = setting(
        "short names of the adapted projections, or all-linear", LINEAR_TARGETS
    )
    rslora: bool = setting("scale by alpha / sqrt(rank), arXiv 2312.03732", False)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def bucket(self) -> int:
        return bucket_of(self.rank)


def bucket_of(rank: int) -> int:
    """Returns the rank bucket that holds ``rank``: the next power of two, up to ``MAX_RANK``."""
    if not 1 <= rank <= MAX_RANK:
        raise UserError(
            f"rank is {rank}; expected 1 to {MAX_RANK} (a policy without an adapter is the base"
            " itself)"
        )
    return 1 << (rank - 1).bit_length()
