"""Quantised weights of published checkpoints, dequantised as they are read.

``fp8`` (DeepSeek-V3, GLM-5-FP8, Qwen3-FP8) stores ``X.weight`` in float8 and one scale
``X.weight_scale_inv`` per block of rows and columns. ``compressed-tensors`` stores integers in the
words of ``X.weight_packed`` (``pack-quantized``: Kimi-K2-Thinking) or float8 (``float-quantized``:
GLM-4.5-FP8), and one ``X.weight_scale`` per row and group of columns, or per block. ``mxfp4``
(gpt-oss) stores experts as pairs of 4-bit floats, ``X_blocks``, with one exponent for 32 columns,
``X_scales``. Numbers equal those of transformers and compressed-tensors bit by bit. ``gptq`` and
``awq`` are in ``models.words``.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mint_jax.errors import UserError
from mint_jax.models.lazy import Computed, Slice, covering, need
from mint_jax.models.words import Words
from mint_jax.safetensors_header import read_header

_FLOAT8 = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_SCALES = ("F32", "BF16", "F16")
_KINDS = {"", "_blocks", "_scales", ".weight", ".weight_scale", ".weight_scale_inv"}
_KINDS |= {".weight_packed", ".weight_zero_point", ".qweight", ".qzeros", ".scales", ".g_idx"}
_REMEDY = "take an unquantised checkpoint, or write one with transformers (dequantize)"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Quantisation of a checkpoint's matrices.

    Attributes:
        bits: 0 for floats; otherwise the bits of a packed integer.
        block: rows and columns of the file's ``[out, in]`` matrix that share a scale; 0 columns
            means all.
        pairs: 4-bit floats of experts, two in a byte.
        compressed: by compressed-tensors, which multiplies in the dtype of the scales; transformers
            does in float32.
    """

    bits: int
    block: tuple[int, int]
    pairs: bool = False
    compressed: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes of a module's tensors: values, scales and, if packed, the shape."""
        if self.pairs:
            return "_blocks", "_scales"
        if self.bits:
            return ".weight_packed", ".weight_scale", ".weight_shape"
        return ".weight", ".weight_scale" if self.compressed else ".weight_scale_inv"

    @property
    def whole(self) -> str:
        """Suffix of the dequantised tensor."""
        return "" if self.pairs else ".weight"

    def matrix(self, name: str, parts: list[Slice]) -> Slice:
        """Returns one quantised tensor; raises ``UserError`` if its parts do not fit together."""
        return Pairs(name, *parts) if self.pairs else Dequantised(name, self, parts)


MXFP4 = Scheme(0, (1, 32), pairs=True)
# Values of e2m1 are twice, and powers half of what they are: 2 to the power of 128 is infinite.
_E2M1 = 2 * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=-1)
_POWERS = np.ldexp(np.float32(1), np.arange(-128, 128))


def scheme_of(config: Mapping[str, Any]) -> Scheme | Words | None:
    """Returns the scheme of a ``config.json``; None if its weights are not quantised.

    Raises:
        UserError: a quantisation that is not read.
    """
    keys = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
    key = next((key for key in keys if config.get(key)), None)
    if key is None:
        return None
    given = config[key]
    method = given.get("quant_method") if isinstance(given, dict) else given
    readers = {"fp8": _fp8, "compressed-tensors": _compressed, "mxfp4": lambda _: MXFP4}
    readers |= {"gptq": _gptq, "awq": _awq}
    if key == "quantization" or method not in readers:
        raise UserError(
            f"the checkpoint is quantised (quant_method {method!r}); only {' and '.join(readers)}"
            f" are read: {_REMEDY}"
        )
    return readers[method](given)


_CONFIG = "quantization_config"


def _need(holds: bool, field: str, value: Any, expected: str) -> None:
    if not holds:
        raise UserError(f"config.json: {field} is {value!r}; expected {expected}: {_REMEDY}")


def _only(given: Mapping[str, Any], where: str = _CONFIG, **allowed: tuple[Any, ...]) -> None:
    """Raises if a field that is present has none of its allowed values."""
    for field, values in allowed.items():
        value = given.get(field, values[0])
        expected = " or ".join(map(repr, values))
        _need(any(value == one for one in values), f"{where}.{field}", value, expected)


def _fp8(given: Mapping[str, Any]) -> Scheme:
    _only(given, activation_scheme=("dynamic",), fmt=("e4m3",), expert_dtype=("fp8",))
    return Scheme(0, _block_of(given, "weight_block_size", (128, 128), _CONFIG))


def _block_of(given: Mapping[str, Any], name: str, default: Any, where: str) -> tuple[int, int]:
    block = given.get(name, default)
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    holds = is_pair and all(type(n) is int and n > 0 for n in block)
    _need(holds, f"{where}.{name}", block, "two positive integers")
    return tuple(block)


# format of compressed-tensors -> type, bits and strategies that are read
_FORMATS = {
    "pack-quantized": ("int", (4, 8), ("group", "channel")),
    "float-quantized": ("float", (8,), ("channel", "block")),
}


def _compressed(given: Mapping[str, Any]) -> Scheme:
    parts = "kv_cache_scheme", "sparsity_config", "transform_config"
    _only(given, quantization_status=("compressed",), **dict.fromkeys(parts, (None, {}, [])))
    _only({"format": None, **given}, format=tuple(_FORMATS))
    kind, bits, strategies = _FORMATS[given["format"]]
    groups: Any = given.get("config_groups")
    has_one, inside = isinstance(groups, dict) and len(groups) == 1, f"{_CONFIG}.config_groups"
    group: Any = next(iter(groups.values())) if has_one else None
    of_one = isinstance(group, dict) and isinstance(group.get("weights"), dict)
    _need(of_one, inside, groups, "one group with weights")
    activations = group.get("input_activations")
    dynamic = isinstance(activations, dict) and activations.get("dynamic") is True
    if kind != "float" or not dynamic:  # a server may quantise them as it runs
        _only(group, inside, input_activations=(None,))
    _only(group, inside, output_activations=(None,))
    weights, inside = group["weights"], f"{inside}.weights"
    _only(
        {"num_bits": None, "type": "int", "symmetric": True, "strategy": None} | weights,
        inside,
        num_bits=bits,
        type=(kind,),
        symmetric=(True,),
        strategy=strategies,
        dynamic=(False,),
        actorder=(None, "weight", "static"),
    )
    bits = weights["num_bits"] if kind == "int" else 0
    if weights["strategy"] == "block":
        return Scheme(0, _block_of(weights, "block_structure", None, inside), compressed=True)
    size = 0
    if weights["strategy"] == "group":
        size = weights.get("group_size")
        _need(type(size) is int and size > 0, f"{inside}.group_size", size, "a positive integer")
    return Scheme(bits, (1, size), compressed=True)


def read_scheme(directory: Path) -> Scheme | Words | None:
    """Returns the scheme of a checkpoint directory; None without a ``config.json``. Classes of
    several media may have it in their ``text_config``.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return scheme_of(config) or scheme_of(config.get("text_config") or {})


def _gptq(given: Mapping[str, Any]) -> Words:
    off = (False, None, {}, "")
    formats = {"gptq": 1, "gptq_v2": 0}  # of these, what is missing from stored zero points
    given = {"bits": None, "group_size": None, "checkpoint_format": "gptq"} | dict(given)
    _only(given, bits=(2, 4, 8), checkpoint_format=tuple(formats), pack_dtype=("int32",))
    _only(given, dynamic=off, lm_head=off, is_marlin_format=off)
    return Words(given["bits"], _group(given), offset=formats[given["checkpoint_format"]])


def _awq(given: Mapping[str, Any]) -> Words:
    given = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"} | dict(given)
    given["version"] = str(given["version"]).lower()  # as transformers does
    _only(given, bits=(4,), zero_point=(True,), version=("gemm",), backend=("auto", "autoawq"))
    return Words(4, _group(given), is_awq=True)


def _group(given: Mapping[str, Any]) -> int:
    size = given["group_size"]
    holds = type(size) is int and (size > 0 or size == -1)
    _need(holds, f"{_CONFIG}.group_size", size, "a positive integer or -1")
    return max(size, 0)


def quantised_modules(scheme: Scheme | Words, names: Iterable[str]) -> list[str]:
    """Returns the modules among tensor ``names`` that have quantised weights.

    Raises:
        UserError: a module has a part of them only, or two kinds of weights.
    """
    names = set(names)
    marks = [part for part in scheme.parts if part not in (".weight", ".weight_shape")]
    found = [(mark, name) for mark in marks for name in names if name.endswith(mark)]
    modules = {name.removesuffix(mark): name for mark, name in found}
    for module, one in modules.items():
        if missing := [part for part in scheme.parts if f"{module}{part}" not in names]:
            raise UserError(f"the checkpoint has {one} but no {module}{missing[0]}: fetch it again")
        unread = {f"{module}{kind}" for kind in _KINDS - set(scheme.parts)} & names
        if unread:
            raise UserError(
                f"the checkpoint has both {one} and {min(unread)}: remove the tensor"
                " that is not part of it"
            )
    return list(modules)


class Pairs(Computed):
    """Experts' matrices ``[E, out, in]`` in MXFP4, read and dequantised slice by slice: ``blocks
    [E, out, in / 32, 16]`` of two values in a byte, the lower half first, and ``scales [E, out, in
    / 32]``, exponents.
    """

    def __init__(self, name: str, blocks: Slice, scales: Slice):
        *grid, width = blocks.get_shape()
        found = [(x.get_dtype(), x.get_shape()) for x in (blocks, scales)]
        holds = len(grid) == 3 and found == [("U8", [*grid, 16]), ("U8", grid)]
        expected = "U8 [experts, rows, columns / 32, 16] and U8 without the last"
        need(holds, f"the blocks and scales of {name!r}", found, expected)
        super().__init__([*grid[:2], grid[2] * 2 * width], "F32")
        self._blocks, self._scales = blocks, scales

    def _part(self, spans: list[slice]) -> np.ndarray:
        *outer, columns = spans
        groups, own = covering(columns, 32)
        packed, scales = (np.asarray(x[(*outer, groups)]) for x in (self._blocks, self._scales))
        # Both halves of each byte by one lookup.
        values = _PAIRS[packed] * _POWERS[scales][..., None, None]
        return values.reshape(*values.shape[:2], 32 * values.shape[2])[..., own]


class Transposed(Computed):
    """Experts' matrices ``[E, out, in]`` of a file that stores ``[E, in, out]``."""

    def __init__(self, stored: Slice):
        first, *rest = stored.get_shape()
        super().__init__([first, *rest[::-1]], stored.get_dtype())
        self._stored = stored

    def _part(self, spans: list[slice]) -> np.ndarray:
        experts, rows, columns = spans
        return np.asarray(self._stored[experts, columns, rows]).swapaxes(1, 2)


class Dequantised(Computed):
    """One quantised matrix ``[out, in]``, read and dequantised slice by slice.

    Raises:
        UserError: shapes or dtypes do not fit together; no values are read before.
    """

    def __init__(self, name: str, scheme: Scheme, parts: list[Slice]):
        values, scales = parts[:2]
        self._scheme, self._values, self._scales = scheme, values, scales
        rows, *rest = values.get_shape()
        expected = "I32" if scheme.bits else "F8_E4M3"
        found = values.get_dtype(), values.get_shape()
        holds = len(rest) == 1 and found[0] == expected
        need(holds, f"the values of {name!r}", found, f"a matrix of {expected}")
        columns = rest[0]
        if scheme.bits:
            declared = [int(n) for n in np.asarray(parts[2][:]).reshape(-1)]
            words = [*declared[:1], *(-(-n * scheme.bits // 32) for n in declared[1:])]
            holds = len(declared) == 2 and [rows, columns] == words
            need(holds, f"the words of {name!r}", [rows, columns], f"a matrix {declared}")
            columns = declared[1]
        super().__init__([rows, columns], scales.get_dtype() if scheme.compressed else "F32")
        self._block = scheme.block[0], scheme.block[1] or columns
        grid = [math.ceil(n / b) for n, b in zip(self._shape, self._block)]
        allowed = _SCALES if scheme.compressed else (*_SCALES, "F8_E8M0")
        found = scales.get_dtype(), scales.get_shape()
        holds = found[1] == grid and found[0] in allowed
        need(holds, f"the scales of {name!r}", found, f"{' or '.join(allowed)} {grid}")

    def _part(self, spans: list[slice]) -> np.ndarray:
        rows, columns = spans
        values = self._read(rows, columns)
        (rows_of, _), (columns_of, own) = (covering(s, b) for s, b in zip(spans, self._block))
        scales = np.asarray(self._scales[rows_of, columns_of])
        # A column's scales in full, one row of blocks at a time: a matrix of all scales would
        # double the memory.
        wide = np.repeat(scales.astype(np.float32), self._block[1], axis=1)[:, own]
        if self._block[0] == 1:
            values *= wide
        else:
            for i, factor in enumerate(wide):
                first = (rows_of.start + i) * self._block[0] - rows.start
                values[max(first, 0) : max(first + self._block[0], 0)] *= factor
        return values.astype(scales.dtype, copy=False) if self._scheme.compressed else values

    def _read(self, rows: slice, columns: slice) -> np.ndarray:
        """Returns stored values as float32."""
        bits = self._scheme.bits
        if not bits:
            return np.asarray(self._values[rows, columns]).astype(np.float32)
        words, own = covering(columns, 32 // bits)
        packed = np.ascontiguousarray(self._values[rows, words]).view(np.uint8)
        if bits == 4:
            packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        values = packed[:, own].astype(np.float32)
        values -= 1 << (bits - 1)
        return values


class Float8(Computed):
    """A float8 tensor of a file, which the safetensors package does not read into NumPy."""

    def __init__(self, path: Path, name: str):
        fields, start = _header(path)
        super().__init__(fields[name]["shape"], fields[name]["dtype"])
        start, size = start + fields[name]["data_offsets"][0], math.prod(self._shape)
        raw = np.memmap(path, np.uint8, "r", start, size or 1)
        self._array = raw[:size].view(_FLOAT8[self._dtype]).reshape(self._shape)

    def _part(self, spans: list[slice]) -> np.ndarray:
        return self._array[tuple(spans)]


def is_float8(dtype: str) -> bool:
    """Returns True for a dtype name of ``Float8``."""
    return dtype in _FLOAT8


_header = functools.lru_cache(maxsize=8)(read_header)
