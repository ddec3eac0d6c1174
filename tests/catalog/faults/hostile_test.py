"""Input that means harm, through the catalog's door: refused in words, or stored and given back
exactly; nothing else changes.
"""

import dataclasses
import io
import json
import pickle
import zipfile

import numpy as np
import pytest

from mint_jax.catalog.packed import pack
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from tests.catalog.adapters import SCHEMA, packed
from tests.catalog.conftest import same_bytes

BAD_NAMES = {
    "traversal": "../../etc/passwd",
    "absolute": "/etc/passwd",
    "backslashes and a drive": "a@..\\..\\c:",
    "hidden": ".ssh",
    "NUL": "a\0b",
    "newline": "a\nb",
    "escape": "a\x1b[2Jb",
    "bidi override": "a\u202etxt.exe",
    "bidi isolate": "\u2066a\u2069",
    "zero width": "pass\u200bword",
    "byte order mark": "\ufeffa",
    "line separator": "a\u2028b",
    "lone surrogate": "a\ud800",
    "unassigned": "a\U000e0fff",
    "long": "a" * 100_000,
    "long in composition": "e\u0301" * 50_000,
    "empty": "",
    "blanks": "   ",
    "slash at the end": "a/",
    "many slashes": "a/b/c",
}
ODD_NAMES = [
    "'; DROP TABLE policies; --",
    'p" OR 1=1 --',
    "%",
    "_",
    "p%' ESCAPE '\\",
    "${jndi:ldap:x}",
    "{0.__class__}",
    "%s%n",
    "\u0440",  # Cyrillic, looks like p
    "\uff50",  # full width
    "naïve",
    "政策",
    "🦀",
    "-rf",
    "NULL",
    "CON",
    "a\\b",
    "~root",
]


def snapshot(catalog) -> dict:
    return catalog.stats()


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_harmful_name_is_refused_everywhere(catalog, name):
    catalog.export("p", packed(1), 1, create=True)
    before = snapshot(catalog)
    calls = [
        lambda: catalog.create_policy(name, SCHEMA),
        lambda: catalog.export(name, packed(2), 1, create=True),
        lambda: catalog.export_many(
            [Export("fresh", packed(3), 1), Export(name, packed(2), 1)], create=True
        ),
        lambda: catalog.promote("p", 1, name),
        lambda: catalog.branch(name, "p@1"),
        lambda: catalog.resolve(name),
        lambda: catalog.load(f"p@{name}"),
        lambda: catalog.resolve("p", tenant=name),
        lambda: catalog.lease(name, "me"),
        lambda: catalog.policy(name),
    ]
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()
    assert snapshot(catalog) == before


def test_odd_names_are_names_and_nothing_more(catalog, place):
    """No text is SQL, a pattern, a format or a path; those that look alike are different."""
    catalog.export("p", packed(0), 0, create=True)
    for number, name in enumerate(ODD_NAMES, start=1):
        catalog.export(name, packed(number), number, create=True, origin=name, by=name, why=name)
        catalog.promote(name, 1, f"{name}x", why=name)
    for number, name in enumerate(ODD_NAMES, start=1):
        assert same_bytes(catalog.load(name), packed(number))
        assert catalog.resolve(f"{name}@{name}x").policy == name
        entry = catalog.audit(name)[-1]
        assert (entry.actor, entry.why) == ("tester", name)
        assert catalog.revision(name, 1).origin == name
    assert {record.policy for record in catalog.policies()} == {"p", *ODD_NAMES}
    assert same_bytes(catalog.load("p"), packed(0))
    assert list(catalog.verify()) == []


@pytest.mark.parametrize("field", ["by", "why", "origin"])
@pytest.mark.parametrize(
    "text", ["x" * 100_000, "a\0b", "\ud800"], ids=["long", "NUL", "surrogate"]
)
def test_harmful_notes_are_refused(catalog, field, text):
    catalog.create_policy("p", SCHEMA)
    before = snapshot(catalog)
    with pytest.raises(UserError):
        catalog.export("p", packed(1), 1, **{field: text})
    assert snapshot(catalog) == before


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb", bytes(10_000_000))
    return buffer.getvalue()


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was read",))


def with_header(text: bytes, claimed: int | None = None) -> bytes:
    return (len(text) if claimed is None else claimed).to_bytes(
        8, "little", signed=claimed is not None and claimed < 0
    ) + text


def with_schema(text: str) -> bytes:
    return with_header(json.dumps({"__metadata__": {"schema": text}}).encode())


GOOD = json.loads(SCHEMA.to_json())
BAD_OBJECTS = {
    "empty": b"",
    "one byte": b"\0",
    "a negative header size": with_header(b"{}", -1),
    "the largest header size": with_header(b"{}", 2**63 - 1),
    "a header beyond the end": with_header(b"{}", 3),
    "no header": with_header(b""),
    "a zip bomb": zipped(),
    "a pickle": pickle.dumps(Bomb()),
    "nested lists": with_header(b"[" * 100_000 + b"]" * 100_000),
    "nested objects": with_header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a schema of nested lists": with_schema("[" * 100_000 + "]" * 100_000),
    "a number of many digits": with_schema('{"rank": ' + "9" * 100_000 + "}"),
    "a huge rank": with_schema(json.dumps(GOOD | {"rank": 10**12})),
    "a negative rank": with_schema(json.dumps(GOOD | {"rank": -1})),
    "an infinite alpha": with_schema(json.dumps(GOOD | {"alpha": float("inf")})),
    "a million targets": with_schema(json.dumps(GOOD | {"targets": ["q"] * 1_000_000})),
    "a field twice": with_schema(SCHEMA.to_json()[:-1] + ', "rank": 2}'),
    "an array outside": with_header(
        json.dumps(
            {
                "__metadata__": {"schema": SCHEMA.to_json()},
                "dense/q/a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
            }
        ).encode()
    ),
    "an array called like a path": with_header(
        json.dumps(
            {
                "__metadata__": {"schema": SCHEMA.to_json()},
                "../../x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
            }
        ).encode()
    ),
}


@pytest.mark.parametrize("data", BAD_OBJECTS.values(), ids=BAD_OBJECTS)
def test_harmful_bytes_are_refused_and_leave_nothing(catalog, data):
    catalog.export("p", packed(1), 1, create=True)
    before, stored = snapshot(catalog), list(catalog.store.packs())
    for call in (
        lambda: catalog.export("p", data, 2),
        lambda: catalog.export("q", data, 2, create=True, force=True),
        lambda: catalog.export_many([Export("p", packed(2), 2), Export("p", data, 2)]),
    ):
        with pytest.raises(UserError, match="not a packed adapter revision") as caught:
            call()
        assert len(str(caught.value)) < 1000
    assert snapshot(catalog) == before
    assert list(catalog.store.packs()) == stored


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_unless_forced(catalog, dtype, value):
    schema = dataclasses.replace(SCHEMA, dtype=dtype)
    a, b = np.zeros((1, 1, 5), np.float32), np.zeros((1, 1, 7), np.float32)
    catalog.export("p", pack({"dense": {"attn": {"q": {"a": a, "b": b}}}}, schema), 0, create=True)
    b[0, 0, 3] = value
    data = pack({"dense": {"attn": {"q": {"a": a, "b": b}}}}, schema)
    before = snapshot(catalog)
    for call in (
        lambda: catalog.export("p", data, 1),
        lambda: catalog.export_many([Export("p", packed(1), 1), Export("p", data, 1)]),
    ):
        with pytest.raises(
            UserError,
            match=(
                r"policy 'p': dense/attn/q/b of the exported adapter has NaN or infinite"
                r" values.*with force"
            ),
        ):
            call()
    assert snapshot(catalog) == before
    assert same_bytes(catalog.load(f"p@{catalog.export('p', data, 1, force=True).number}"), data)
    assert list(catalog.verify()) == []


def test_weights_may_lie_anywhere(catalog):
    """A file of another writer need not align its data."""
    text = json.dumps(
        {
            "__metadata__": {"schema": SCHEMA.to_json()},
            "x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        }
    ).encode()
    for pad in range(4):
        head = with_header(text + b" " * pad)
        catalog.export("p", head + np.float32([pad, 2, 3]).tobytes(), pad, create=True)
        with pytest.raises(UserError, match="NaN or infinite"):
            catalog.export("p", head + np.float32([pad, np.nan, 3]).tobytes(), pad)
