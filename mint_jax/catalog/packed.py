"""The packed object: one adapter revision as bytes.

A safetensors file (see ``header``) of the factors, one contiguous array per projection and A/B in
the layout of ``lora.tree``, with one metadata entry ``schema``. Its BLAKE3 hash is the revision's
digest: it covers factors, schema and base. The same adapter always has the same bytes.
"""

import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np

from mint_jax import nested
from mint_jax.catalog import header
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora.config import BASIS, BIAS, KINDS, MAX_RANK, SHARED_OUTER, AdapterConfig
from mint_jax.safetensors_header import parse_object

FORMAT = "mint-adapter/2"
# A [L, R, D] and B [L, R, F]; routed experts [L, E, R, D] and [L, E, R, F]
LAYOUT = "layers-experts-rank-first"
# Form of routed experts' factors, or kind -> layout. In the second the factor on the hidden side is
# shared, [L, R, D], and names have ``shared_outer`` before the projection. In the third the rank is
# 0, and a projection has one array, ``bias`` [L, 1, F]. In the fourth it has A alone: its B is that
# of ``lora.basis``.
LAYOUTS = {"each": LAYOUT} | {one: f"{LAYOUT}/{one}" for one in (SHARED_OUTER, BIAS, BASIS)}
SCALES = {False: "alpha/rank", True: "alpha/sqrt(rank)"}
MAX_TEXT = 1000  # characters of a base's fingerprint or a target's name

Buffer = bytes | bytearray | memoryview | np.ndarray


@dataclasses.dataclass(frozen=True)
class Schema:
    """The description of a packed adapter."""

    base: str  # fingerprint of the base
    config: AdapterConfig
    dtype: str = "float32"  # of the stored factors: float32, float16 or bfloat16

    def to_json(self) -> str:
        """Returns one line of JSON, equal for equal schemas."""
        config = self.config
        fields = {
            "format": FORMAT,
            "base": self.base,
            "rank": int(config.rank),
            "alpha": float(config.alpha),
            "scale": SCALES[bool(config.rslora)],
            "targets": list(config.targets),
            "layout": LAYOUTS[config.experts if config.kind == "lora" else config.kind],
            "dtype": self.dtype,
        }
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Reads ``to_json``'s text. Raises ``UserError``: another format, a field missing, unknown
        or out of its range.
        """
        fields = parse_object(text, "the schema")
        if fields.get("format") != FORMAT:
            raise UserError(
                f"its format is {str(fields.get('format'))[:40]!r}; this version reads {FORMAT!r}"
            )
        scales = {rule: rslora for rslora, rule in SCALES.items()}
        checks = {
            "format": (lambda _: True, FORMAT),
            "base": (_is_text, "a fingerprint"),
            "rank": (lambda x: header.is_size(x) and x <= MAX_RANK, f"0 to {MAX_RANK}"),
            "alpha": (lambda x: type(x) is float and math.isfinite(x), "a finite number"),
            "scale": (lambda x: x in list(scales), " or ".join(scales)),
            "targets": (
                lambda x: type(x) is list and x and all(map(_is_text, x)),
                "a list of names",
            ),
            "layout": (lambda x: x in list(LAYOUTS.values()), " or ".join(LAYOUTS.values())),
            "dtype": (lambda x: x in list(header.TAGS), " or ".join(header.TAGS)),
        }
        if strange := sorted(fields.keys() ^ checks):
            raise UserError(
                f"the schema {'has' if strange[0] in fields else 'lacks'} {ascii(strange[0])[:60]};"
                f" expected {', '.join(sorted(checks))}"
            )
        for name, (is_good, expected) in checks.items():
            if not is_good(fields[name]):
                found = ascii(fields[name])[:60]
                raise UserError(f"the schema's {name} is {found}; expected {expected}")
        forms = {layout: form for form, layout in LAYOUTS.items()}
        form = forms[fields["layout"]]
        config = AdapterConfig(
            fields["rank"],
            fields["alpha"],
            tuple(fields["targets"]),
            scales[fields["scale"]],
            *(("each", form) if form in KINDS else (form,)),
        )
        return cls(fields["base"], config, fields["dtype"])


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_TEXT


def pack(adapter: Any, schema: Schema) -> bytes:
    """Packs one policy's factors, deterministically. Raises ``UserError`` for a schema or an array
    name that ``unpack`` would refuse.
    """
    text = schema.to_json()
    Schema.from_json(text)
    dtype = header.DTYPES[header.TAGS[schema.dtype]]
    arrays = {
        path: np.asarray(leaf, dtype=dtype, order="C")
        for path, leaf in nested.leaves_with_path(adapter)
    }
    parts = [arrays[path].reshape(-1).view(np.uint8).data for path in header.layout(arrays)]
    return b"".join([header.write(arrays, {"schema": text}), *parts])


def unpack(data: Buffer) -> tuple[Any, Schema]:
    """Unpacks factors and schema. Raises ``UserError``: not a packed adapter, damaged, or of
    another version; nothing of its claimed size was allocated. ``data``: bytes, a memoryview or a
    uint8 array, memory-mapped too.

    Returns:
        A nested dict of read-only arrays, views of ``data``, and the schema.
    """
    view = as_bytes(data)
    try:
        metadata, tensors, start = header.read(view)
        if "schema" not in metadata:
            raise UserError("it has no schema")
        schema = Schema.from_json(metadata["schema"])
        for name, tensor in tensors.items():
            if str(tensor.dtype) != schema.dtype:
                raise UserError(f"array {name} is {tensor.dtype}, its schema says {schema.dtype}")
    except UserError as error:
        raise UserError(
            f"not a packed adapter revision ({error}): import PEFT directories with the import job"
        ) from None
    flat = {}
    for name, tensor in sorted(tensors.items()):
        data = view[start + tensor.begin : start + tensor.end]
        flat[name] = data.view(tensor.dtype).reshape(tensor.shape)
    return nested.nest(flat), schema


def digest_of(data: Buffer) -> str:
    """Returns the revision digest of a packed object: BLAKE3, 64 hex digits."""
    return blake3_of(as_bytes(data))


@functools.lru_cache(1024)
def schema_digest(text: str) -> bytes:
    """Returns the digest of a schema's text, 32 bytes."""
    return bytes.fromhex(digest_of(text.encode(errors="replace")))


def as_bytes(data: Buffer) -> np.ndarray:
    """Returns a read-only uint8 view of a contiguous buffer."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError(f"an array of strides {data.strides} is not one run of bytes")
        view = np.asarray(data).reshape(-1).view(np.uint8).view()
    else:
        view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return view
