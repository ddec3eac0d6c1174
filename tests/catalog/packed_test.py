"""The packed object: aligned, read without a copy, and strict with whatever a stranger put in
it.
"""

import dataclasses
import io
import json
import math
import pickle
import struct
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax import params as params_lib
from mint_jax.catalog import header
from mint_jax.catalog.packed import Schema, as_bytes, digest_of, pack, unpack
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from tests.memory import assert_takes_at_most

SCHEMA = Schema("ab" * 32, AdapterConfig(3, 6.0, ("q", "gate")))
SHAPES = {
    "dense/attn/q/a": (2, 3, 40),
    "dense/attn/q/b": (2, 3, 8),
    "moe/mlp/gate/a": (2, 5, 3, 16),
    "moe/mlp/gate/b": (2, 5, 3, 7),
}
RNG = np.random.default_rng(0)


def adapter(shapes=SHAPES, rng=RNG) -> dict:
    return params_lib.nest(
        {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    )


def flat(tree) -> dict:
    return dict(params_lib.leaves_with_path(tree))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("bytes", "float32"), ("map", "bfloat16"), ("unaligned", "float32")]
)
def test_reading_is_exact_and_copies_nothing(tmp_path, kind, dtype):
    tree = adapter()
    data = pack(tree, Schema("base", SCHEMA.config, dtype))
    (tmp_path / "file").write_bytes(b"\0" * 4096 + data)
    holder = {
        "bytes": data,
        "map": np.memmap(tmp_path / "file", np.uint8, "r", offset=4096),
        "unaligned": np.frombuffer(b"\0" + data, np.uint8)[1:],
    }[kind]
    found, _ = unpack(holder)
    assert list(flat(found)) == sorted(SHAPES)
    for path, leaf in flat(found).items():
        assert leaf.dtype == jnp.dtype(dtype)
        assert leaf.tobytes() == flat(tree)[path].astype(jnp.dtype(dtype)).tobytes()
        assert np.shares_memory(leaf, as_bytes(holder))
        with pytest.raises(ValueError, match="read-only"):
            leaf[...] = 0
    assert digest_of(holder) == digest_of(data)
    with pytest.raises(ValueError, match="not one run of bytes"):
        unpack(np.zeros(10, np.uint8)[::2])


def test_the_layout_says_which_factors_experts_share():
    """Files of the usual form are as they were."""
    usual = json.loads(SCHEMA.to_json())
    assert usual["layout"] == "layers-experts-rank-first"
    shared = Schema("ab" * 32, dataclasses.replace(SCHEMA.config, experts="shared_outer"))
    fields = json.loads(shared.to_json())
    assert fields == usual | {"layout": "layers-experts-rank-first/shared_outer"}
    assert Schema.from_json(shared.to_json()) == shared
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA


def file_of(fields, data=b"") -> bytes:
    """A file with any header: JSON text, or fields to which the schema is added."""
    if isinstance(fields, dict):
        fields = json.dumps({"__metadata__": {"schema": SCHEMA.to_json()}, **fields})
    text = fields if isinstance(fields, bytes) else fields.encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin=0, end=8, shape=(2,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", b"\0" * (1 << 20))
    return file.getvalue()


DATA = b"\0" * 8
SCHEMA_TEXT = json.dumps(SCHEMA.to_json())
HOSTILE = {
    "nothing": (b"", "0 bytes"),
    "header beyond the file": (struct.pack("<Q", 100) + b"{}", "claims 100 bytes"),
    "header of 2^63": (
        struct.pack("<Q", 1 << 63) + b"{}" * 100,
        "claims 9223372036854775808 bytes",
    ),
    "nested lists": (file_of("[" * 100_000), "nested too deeply|is not JSON"),
    "twice": (
        file_of(
            f'{{"__metadata__":{{"schema":{SCHEMA_TEXT}}},"a":{json.dumps(entry())},"a":{json.dumps(entry())}}}',
            DATA,
        ),
        "'a' twice",
    ),
    "dtype unknown": (file_of({"a": entry(dtype="F99")}, DATA), "dtype 'F99'"),
    "dtype not the schema's": (
        file_of({"a": entry(shape=(4,), dtype="F16")}, DATA),
        "its schema says float32",
    ),
    "product overflows": (
        file_of({"a": entry(shape=(1 << 62, 4, 2))}, DATA),
        "needs 147573952589676412928 bytes",
    ),
    "terabytes": (file_of({"a": entry(0, 4 << 40, shape=(1 << 40,))}, DATA), "ends at byte"),
    "out of range": (file_of({"a": entry(0, 8), "b": entry(8, 16)}, DATA), "ends at byte 16 of 8"),
    "gap": (file_of({"a": entry(0, 8), "b": entry(12, 20)}, DATA * 3), "before it ends at 8"),
    "upwards": (file_of({"../../a": entry()}, DATA), "not a path"),
    "array and folder": (
        file_of({"a": entry(0, 8), "a/b": entry(8, 16)}, DATA * 2),
        "'a' is an array and a folder",
    ),
    "zip": (zipped(), "zip archive"),
    "pickle": (pickle.dumps({"lora_A": list(range(50))}), "a pickle"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_with_the_reason_before_memory_is_taken(name):
    data, reason = HOSTILE[name]

    def refused():
        with pytest.raises(UserError, match=reason) as caught:
            unpack(data)
        assert "not a packed adapter revision" in str(caught.value)
        assert len(str(caught.value)) < 600
        assert str(caught.value).isprintable()

    assert_takes_at_most(40 * header.MAX_HEADER, refused)


def changed(**change):
    fields = json.loads(SCHEMA.to_json())
    for name, value in change.items():
        fields.pop(name, None) if value is KeyError else fields.__setitem__(name, value)
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (changed(format="mint-adapter/1"), "this version reads"),
        (changed(base=""), "base"),
        (changed(rank=0), "rank"),
        (changed(rank=3.0), "rank"),
        (changed(alpha="6"), "alpha"),
        (changed(alpha=1e999), "Infinity"),
        (changed(targets=[1]), "targets"),
        (changed(dtype="int8"), "dtype"),
        (changed(dtype=KeyError), "lacks 'dtype'"),
        (changed(merged=True), "has 'merged'"),
    ],
)
def test_a_schema_is_read_strictly(text, reason):
    with pytest.raises(UserError, match=reason):
        Schema.from_json(text)


def check(data: bytes) -> None:
    """Refused, or exactly what the safetensors package finds in it."""
    try:
        found, schema = unpack(data)
    except UserError:
        return
    expected = {
        name: (bytes(tensor["data"]), tuple(tensor["shape"]))
        for name, tensor in safetensors.deserialize(data)
    }
    assert {name: (leaf.tobytes(), leaf.shape) for name, leaf in flat(found).items()} == expected
    assert {str(leaf.dtype) for leaf in flat(found).values()} <= {schema.dtype}
    again, same = unpack(pack(found, schema))
    assert same == schema
    assert {n: x.tobytes() for n, x in flat(again).items()} == {
        n: x.tobytes() for n, x in flat(found).items()
    }


GOOD = pack(adapter({"attn/q/a": (2, 3, 4), "attn/q/b": (2, 3, 5), "empty": (0,)}), SCHEMA)


fuzz = settings(max_examples=150)


@fuzz
@given(
    st.dictionaries(
        st.sampled_from(["q/a", "q/b", "moe/gate/a", "moe/gate/b", "embed/a"]),
        st.lists(st.integers(0, 9), max_size=4),
        min_size=1,
    ),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(0, 1 << 30),
)
def test_any_adapter_comes_back_bit_by_bit(shapes, dtype, seed):
    """And is what the safetensors package reads: see ``check``."""
    bits, kind = np.random.default_rng(seed), header.DTYPES[header.TAGS[dtype]]
    tree = {
        name: np.frombuffer(bits.bytes(math.prod(shape) * kind.itemsize), kind).reshape(shape)
        for name, shape in shapes.items()
    }
    data = pack(params_lib.nest(tree), Schema("base", SCHEMA.config, dtype))
    assert {name: (x.shape, x.tobytes()) for name, x in flat(unpack(data)[0]).items()} == {
        name: (x.shape, x.tobytes()) for name, x in tree.items()
    }
    check(data)


@fuzz
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(1, 255)), min_size=1, max_size=4),
    st.integers(-20, 20),
)
def test_any_damage_is_refused_or_read_exactly(flips, longer):
    data = bytearray(GOOD)
    for at, bits in flips:
        data[at] ^= bits
    check(bytes(data[:longer] if longer < 0 else data + b"\0" * longer))
