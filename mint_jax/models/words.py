"""GPTQ and AWQ: matrices of integers in 32-bit words, stored ``[in, out]`` and dequantised as they
are read.

``w[i, o] = (q[i, o] - z[g, o]) * s[g, o]``, where g is the group of input i, in the dtype of the
scales. GPTQ (arXiv 2210.17323) packs q along the inputs; ``g_idx`` has the groups, in any order if
``desc_act`` is set. AWQ (arXiv 2306.00978) packs q along the outputs, whose order in a word is
``_ORDER``. Both pack zero points z along the outputs; GPTQ's first format stores z - 1.
"""

import dataclasses
from typing import Any

import numpy as np

from mint_jax.errors import UserError
from mint_jax.models.lazy import Computed, covering, need

_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of a word that has the next output, AWQ


@dataclasses.dataclass(frozen=True)
class Words:
    """Quantisation of a checkpoint's matrices.

    Attributes:
        bits: of an integer; divides 32.
        group: inputs that share a scale; 0 means all.
        is_awq: AWQ's order of packing; otherwise GPTQ's.
        offset: of the stored zero points, 1 in GPTQ's first format.
    """

    bits: int
    group: int
    is_awq: bool = False
    offset: int = 0

    whole = ".weight"

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes of a module's tensors."""
        return (".qweight", ".qzeros", ".scales", *(() if self.is_awq else (".g_idx",)))

    def matrix(self, name: str, parts: list[Any]) -> "WordMatrix":
        return WordMatrix(name, self, parts)

    def unpack(self, words: np.ndarray) -> np.ndarray:
        """Returns the integers of words ``[N, M]``, packed along M."""
        shifts = np.arange(0, 32, self.bits, dtype=np.uint32)
        shifts = shifts[_ORDER] if self.is_awq else shifts
        parts = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << self.bits) - 1)
        return parts.reshape(len(words), -1).astype(np.int32)


class WordMatrix(Computed):
    """One matrix, ``[out, in]`` as a Linear has it, read and dequantised slice by slice.

    Raises:
        UserError: shapes or dtypes do not fit together, a group does not exist, or programs
            disagree on a zero point.
    """

    def __init__(self, name: str, words: Words, parts: list[Any]):
        self._name, self._words, self._per_word = name, words, 32 // words.bits
        values, zeros, scales = parts[:3]
        of = None if words.is_awq else parts[3]
        self._values, self._zeros, self._scales, self._of = values, zeros, scales, of
        found = {part: (x.get_dtype(), x.get_shape()) for part, x in zip(words.parts, parts)}
        matrices = [shape for part, (_, shape) in found.items() if part != ".g_idx"]
        need(all(len(shape) == 2 for shape in matrices), repr(name), found, "matrices")
        inputs, outputs = values.get_shape()
        if words.is_awq:
            outputs *= self._per_word
        else:
            inputs *= self._per_word
        size = words.group or inputs
        grid = [-(-inputs // size), outputs]
        expected = {
            ".qweight": ("I32", values.get_shape()),
            ".qzeros": ("I32", [grid[0], -(-outputs // self._per_word)]),
            ".scales": (scales.get_dtype(), grid),
        }
        if of is not None:
            expected[".g_idx"] = "I32", [inputs]
        holds = found == expected and scales.get_dtype() in ("F16", "BF16", "F32")
        need(holds, repr(name), found, f"{expected} with scales in F16, BF16 or F32")
        super().__init__([outputs, inputs], scales.get_dtype())

    def _part(self, spans: list[slice]) -> np.ndarray:
        outputs, inputs = spans
        values = self._integers(inputs, outputs).astype(np.float32)
        groups = self._groups(inputs)
        for group in np.unique(groups):  # one at a time: scales of all would double the memory
            here, row = groups == group, slice(int(group), int(group) + 1)
            zeros = self._unpacked(self._zeros, row, outputs)[0]
            if self._words.offset and (zeros == (1 << self._words.bits) - 1).any():
                raise UserError(
                    f"{self._name!r} has a zero point of 0, which GPTQ's first format does not"
                    " store reliably: write the checkpoint in the format gptq_v2"
                )
            scales = np.asarray(self._scales[row, outputs]).astype(np.float32)
            values[here] = (values[here] - (zeros + self._words.offset)) * scales
        return values.T.astype(np.asarray(self._scales[:0]).dtype)

    def _integers(self, inputs: slice, outputs: slice) -> np.ndarray:
        """Returns stored integers, ``[in, out]``."""
        if self._words.is_awq:
            return self._unpacked(self._values, inputs, outputs)
        words, own = covering(inputs, self._per_word)
        packed = np.ascontiguousarray(np.asarray(self._values[words, outputs]).T)
        return self._words.unpack(packed)[:, own].T

    def _unpacked(self, stored: Any, rows: slice, columns: slice) -> np.ndarray:
        words, own = covering(columns, self._per_word)
        packed = np.ascontiguousarray(np.asarray(stored[rows, words]))
        return self._words.unpack(packed)[:, own]

    def _groups(self, inputs: slice) -> np.ndarray:
        if self._of is None:
            return np.arange(inputs.start, inputs.stop) // (self._words.group or self._shape[1])
        groups, count = np.asarray(self._of[inputs]), self._scales.get_shape()[0]
        if groups.size and not 0 <= groups.min() <= groups.max() < count:
            raise UserError(
                f"the g_idx of {self._name!r} is {groups.min()} to {groups.max()}; expected 0 to"
                f" {count - 1}: the checkpoint is damaged, fetch it again"
            )
        return groups
