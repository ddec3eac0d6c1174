"""Configuration of an adapter. Imports no jax: the catalog reads it for a million adapters."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated

from mint_jax.errors import UserError
from mint_jax.fields import Settings, setting

MAX_RANK = 1024
# Form of routed experts' adapters: the factor on the hidden side is one for all of a layer.
SHARED_OUTER = "shared_outer"
FORMS = ("each", SHARED_OUTER)
# Low-rank factors, a bias of each target's outputs alone (BitFit, arXiv 2106.10199), or factors
# whose B all policies share, see ``basis``.
BIAS, BASIS = "bias", "basis"
KINDS = ("lora", BIAS, BASIS)
# Of a new A: uniform as PEFT's, or rows of length 1 at right angles. B is zero.
INITS = ("uniform", "orthonormal")
LINEAR_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True, repr=False)
class AdapterConfig(Settings):
    """Shape and scale of an adapter."""

    rank: int = setting(
        "number of rows R of A and of columns of B, at least 1; must be given unless kind is bias",
        0,
    )
    alpha: float = setting(
        "numerator of the scale: the delta is alpha / rank * B A x, or alpha / sqrt(rank) with "
        "rslora",
        16.0,
    )
    targets: tuple[str, ...] = setting(
        "short names of the adapted projections, or all-linear", LINEAR_TARGETS
    )
    rslora: bool = setting("scale by alpha / sqrt(rank), arXiv 2312.03732", False)
    experts: Annotated[str, FORMS] = setting(
        "factors of routed experts: each has its own A and B, or A of gate and up and B of down are"
        " shared by all experts of a layer",
        "each",
    )
    kind: Annotated[str, KINDS] = setting(
        "lora; bias: a vector added to the outputs of each target, without A, B and rank; basis: "
        "lora whose B is fixed, the same for every policy, so that A alone is trained and stored",
        "lora",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.kind != BIAS:
            bucket_of(self.rank)  # raises
        lacks = {BIAS: ("rank", "alpha", "rslora", "experts"), BASIS: ("experts",)}
        for name in lacks.get(self.kind, ()):
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise UserError(
                    f"{name} is {value!r}, which an adapter of kind {self.kind!r} does not have:"
                    " leave it out, or set kind to 'lora'"
                )

    @property
    def scale(self) -> float:
        if self.kind == BIAS:
            return 1.0
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Targets as stacks name them, marked with the form of experts' factors."""
        mark = "" if self.experts == "each" else f"@{self.experts}"
        return tuple(target + mark for target in self.targets)

    @property
    def bucket(self) -> int:
        return bucket_of(self.rank) if self.rank else 0

    @property
    def rows(self) -> int:
        """Rows of a stored factor: the rank, and 1 of a bias."""
        return self.rank or 1

    @property
    def size(self) -> str:
        """The size in words: ``rank 8``, or ``bias alone``."""
        return f"rank {self.rank}" if self.rank else "bias alone"


def bucket_of(rank: int) -> int:
    """Returns the rank bucket that holds ``rank``: the next power of two, up to ``MAX_RANK``."""
    if not 1 <= rank <= MAX_RANK:
        raise UserError(
            f"rank is {rank}; expected 1 to {MAX_RANK} (a policy without an adapter is the base"
            " itself)"
        )
    return 1 << (rank - 1).bit_length()


def bucket_for(rank: int, buckets: Iterable[int]) -> int | None:
    """Returns the smallest of these rank buckets that has room; a bias, rank 0, needs bucket 0."""
    return min((bucket for bucket in buckets if bucket == rank or 0 < rank <= bucket), default=None)
