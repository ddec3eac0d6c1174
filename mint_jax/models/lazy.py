"""Tensors of a file that are read part by part."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mint_jax.errors import UserError


class Slice(Protocol):
    """A lazily read tensor, as ``safetensors.safe_open(...).get_slice`` returns it."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any) -> np.ndarray: ...


def covering(span: slice, size: int) -> tuple[slice, slice]:
    """Returns the groups of ``size`` elements that cover a span, and the span within these."""
    first = span.start // size
    start = span.start - first * size
    return slice(first, -(-span.stop // size)), slice(start, start + span.stop - span.start)


def need(holds: bool, what: str, found: object, expected: object) -> None:
    """Raises ``UserError`` unless the tensors of a file are as its config says."""
    if not holds:
        raise UserError(
            f"{what}: found {found}, expected {expected}: config.json and weights do not match"
        )


class Computed:
    """A ``Slice`` whose parts ``_part`` computes as they are read."""

    def __init__(self, shape: Sequence[int], dtype: str):
        self._shape, self._dtype = list(shape), dtype

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        index = tuple(i for i in index if i is not Ellipsis)
        spans = [slice(*one.indices(n)) for one, n in zip(index, self._shape)]
        spans += [slice(0, n, 1) for n in self._shape[len(spans) :]]
        assert all(span.step == 1 for span in spans)
        return self._part(spans)

    def _part(self, spans: list[slice]) -> np.ndarray:
        """Returns a part, given a span of each axis."""
        raise NotImplementedError
