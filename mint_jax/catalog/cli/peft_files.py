"""Reading of one source, which a stranger may have made: PEFT directory, Orbax checkpoint or packed
file. Everything is checked before anything large is read.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import nested
from mint_jax.catalog import header
from mint_jax.catalog.cli.sources import CONFIG, WEIGHTS, Source, pickle_refusal
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.errors import UserError
from mint_jax.lora import peft, tree
from mint_jax.lora.config import MAX_RANK, SHARED_OUTER
from mint_jax.lora.fused import DEFAULT_ALPHA, DEFAULT_RANK, STACKED
from mint_jax.models.outline import Outline
from mint_jax.safetensors_header import parse_json, read_header

MAX_CONFIG = 4 << 20
MAX_HEADER = 64 << 20  # Kimi-K2 has 138,000 factors of experts, 24 MB of header
_HALVES = {"BF16": "bfloat16", "F16": "float16"}


def packed_object(
    source: Source,
    base: Outline | None,
    dtype: str,
    force: bool,
    max_bytes: int,
    experts: str = "each",
) -> bytes:
    """Returns the packed object of a source. Raises ``UserError``: it is refused; ``OSError``: it
    cannot be read.

    Args:
        base: required for PEFT directories; others must match it if given.
        dtype: of the factors; ``keep``: the file's, if that is exact.
        force: accept NaN and infinite weights.
        experts: form of a PEFT directory's factors of routed experts.
    """
    if source.orbax:
        from mint_jax.catalog import orbax_files  # imports Orbax, which takes seconds

        return _checked(orbax_files.read(source.path, max_bytes), source, base, force)
    if not source.peft:
        return _checked(source.file("", max_bytes).read_bytes(), source, base, force)
    assert base is not None
    tags = _check_directory(source, base, max_bytes)
    names, projections = base.tables
    adapter, config = peft.read_peft(source.path, names, projections, finite=not force)
    if experts == SHARED_OUTER and config.experts != experts:
        adapter = tree.shared_outer(adapter, source.path.name)
        config = dataclasses.replace(config, experts=experts)
    tree.check_fits(adapter, config, base.specs, source.path.name, finite=False)
    if dtype == "keep":
        dtype = _HALVES[tags.pop()] if len(tags) == 1 and tags <= _HALVES.keys() else "float32"
        if not _is_exact(adapter, dtype):  # factors of several scales were brought to one
            dtype = "float32"
    elif not force:
        with np.errstate(over="ignore"):
            narrow = nested.map_with_path(
                lambda _, leaf: leaf.astype(header.DTYPES[header.TAGS[dtype]]), adapter
            )
        tree.check_finite(narrow, f"{source.path.name} in {dtype}")
    return pack(adapter, Schema(base.fingerprint, config, dtype))


def _is_exact(adapter: Any, dtype: str) -> bool:
    narrow = header.DTYPES[header.TAGS[dtype]]
    with np.errstate(over="ignore"):
        return all(
            np.array_equal(leaf, leaf.astype(narrow).astype(np.float32), equal_nan=True)
            for _, leaf in nested.leaves_with_path(adapter)
        )


def _checked(data: bytes, source: Source, base: Outline | None, force: bool) -> bytes:
    """Returns a packed object unchanged, after the checks that a PEFT directory gets."""
    adapter, schema = unpack(data)
    if base is not None:
        if schema.base != base.fingerprint:
            raise UserError(
                f"it was trained on base {schema.base[:12]}, {base.name!r} is"
                f" {base.fingerprint[:12]}: give its own base, or none"
            )
        tree.check_fits(adapter, schema.config, base.specs, source.path.name, finite=False)
    if not force:
        tree.check_finite(adapter, source.path.name)
    return data


def _check_directory(source: Source, base: Outline, max_bytes: int) -> set[str]:
    """Checks config and header of a PEFT directory; returns its factors' safetensors dtypes."""
    config = parse_json(source.file(CONFIG, MAX_CONFIG).read_bytes(), CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{CONFIG} is not a JSON object")
    rank = _check_config(config)
    if not (source.path / WEIGHTS).exists() and (source.path / "adapter_model.bin").exists():
        raise UserError(pickle_refusal("adapter_model.bin"))
    fields = _read_header(source.file(WEIGHTS, max_bytes))
    needed = _unpacked_bytes(set(fields), base, rank)
    if needed > max_bytes:
        raise UserError(
            f"rank {rank} in all layers of its projections takes {needed:,} bytes, and"
            f" {max_bytes:,} are allowed: see --max-bytes"
        )
    return {
        str(entry.get("dtype"))
        for name, entry in fields.items()
        if ".lora_" in name and isinstance(entry, dict)
    }


def _read_header(path: Path) -> dict[str, Any]:
    fields, _ = read_header(path, MAX_HEADER, f"{WEIGHTS}: its header")
    fields.pop("__metadata__", None)
    return fields


def _check_config(config: dict[str, Any]) -> int:
    """Checks types and sizes of the fields that ``lora`` reads; returns the largest rank."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise UserError(f"{CONFIG}: rank_pattern and alpha_pattern must be objects")
    for pattern in [*ranks, *alphas]:
        _check_pattern(pattern)
    all_ranks = [("r", config.get("r", DEFAULT_RANK)), *ranks.items()]
    for name, rank in all_ranks:
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise UserError(
                f"{CONFIG}: {name[:60]} is {ascii(rank)[:60]}; expected 1 to {MAX_RANK}"
            )
    for name, alpha in [("lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA)), *alphas.items()]:
        if type(alpha) not in (int, float) or abs(alpha) > 1e9 or not math.isfinite(alpha):
            raise UserError(f"{CONFIG}: {name[:60]} is {ascii(alpha)[:60]}; expected a number")
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(one, str) for one in parameters):
        raise UserError(f"{CONFIG}: target_parameters is not a list of names")
    if len(str(config.get("peft_version"))) > 100:
        raise UserError(f"{CONFIG}: peft_version is not a version")
    return max(rank for _, rank in all_ranks)


def _check_pattern(pattern: str) -> None:
    """Refuses a regular expression that could match slowly: few repetitions, none of a group."""
    if (
        len(pattern) > 500
        or len(re.findall(r"(?<!\\)[*+{]", pattern)) > 3
        or re.search(r"\)[*+{]|\(\?[^:]|\\\d", pattern)
    ):
        raise UserError(
            f"{CONFIG}: pattern {pattern[:60]!r} is too involved: write module names, and .* for a"
            " part of one"
        )
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"{CONFIG}: pattern {pattern[:60]!r} is no regular expression ({error})"
        ) from None


def _unpacked_bytes(tensors: set[str], base: Outline, rank: int) -> int:
    """Returns the bytes of all layers of the file's projections at the largest rank."""
    modules = {
        re.sub(r"(\.base_layer)?\.lora_(embedding_)?[AB](\.weight)?$", "", name).removeprefix(
            "base_model.model."
        )
        for name in tensors
    }
    names, projections = base.tables
    targets = set()
    for path, own in names.items():
        fused = (
            {name.rsplit(".", 2)[0] for name in own} if len(projections[path].stack) == 2 else set()
        )
        fused |= {f"{name}.{part}" for name in fused for part in STACKED}
        if modules & {*own, *fused}:
            targets.add(path.rsplit("/", 1)[-1])
    chosen = [projections[path] for path in names if path.rsplit("/", 1)[-1] in targets]
    return sum(4 * rank * math.prod(one.stack) * (one.d_in + one.d_out) for one in chosen)
