"""Completions under a grammar: the standard library's own parsers say whether they follow it; a
mask hides no allowed token.
"""

import json
import re
import time

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.grammar import Grammars, mask_of
from mint_jax.rollout.request import BadField, Request

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "grace"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
PATTERN = r"[a-f]{3}-[0-9]{2,4}"
CHOICES = ("yes", "no", 'may"be', "no, thanks")


@pytest.fixture(scope="module")
def base(mesh):
    return base_lib.load("tiny-random", mesh)


def test_completions_of_mixed_rows_follow_their_grammars(rng, base):
    """A random model at a high temperature writes noise where nothing binds it."""
    engine = Engine(base, base.need_tokenizer().decode, rows=(8,))
    ends = base.need_tokenizer().eos_ids
    kinds = [{"json_schema": json.dumps(SCHEMA)}, {"regex": PATTERN}, {"choice": CHOICES}, {}]
    how = {"n": 4, "max_tokens": 60, "temperature": 1.5, "stop_ids": ends}
    how["seed"] = int(rng.integers(2**31))
    requests = [Request(tuple(rng.integers(5, 9000, 6).tolist()), **how, **kind) for kind in kinds]
    schema, pattern, choice, free = engine.generate(requests)
    for c in schema:
        found = json.loads(c.text)
        assert set(found) == {"name", "age", "ok"}
        assert found["name"] in ("ada", "grace")
        assert isinstance(found["age"], int)
        assert 0 <= found["age"] <= 120
        assert isinstance(found["ok"], bool)
    assert all(re.fullmatch(PATTERN, c.text) for c in pattern)
    assert all(c.text in CHOICES for c in choice)
    assert {c.finish for c in (*schema, *pattern, *choice)} == {"stop"}
    assert not any(re.fullmatch(PATTERN, c.text) or c.text in CHOICES for c in free)
    for c in (*schema, *pattern, *choice):
        assert np.isfinite([c.logprobs, c.drawn_logprobs]).all()
    assert engine.generate(requests[3:])[0] == free


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"regex": "["}, r"regex '\[' cannot be used"),
        ({"json_schema": '{"type": "nothing"}'}, "json_schema .* cannot be used"),
        ({"choice": ()}, "choice .* expected at least one"),
        ({"choice": ("a",), "regex": "a"}, "regex and choice: give one of them"),
    ],
)
def test_a_grammar_that_means_nothing_is_refused(base, bad, message):
    engine = Engine(base, base.need_tokenizer().decode)
    with pytest.raises(UserError, match=message):
        engine.generate([Request((5, 6)), Request((5, 6), **bad)])


EMPTY = [  # schemas that no JSON of finite length fits
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {
        "$defs": {
            "x/y": {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["z"]}
        },
        "anyOf": [{"$ref": "#/$defs/x~1y"}],
    },
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "string", "pattern": "[^\\s\\S]"},
]
RECURSIVE = [  # schemas that refer to themselves, and end
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["next"],
    },
    {
        "$defs": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1},
            "b": {"enum": [1]},
        },
        "$ref": "#/$defs/a",
    },
]


def test_schemas_that_nothing_fits_are_refused_and_recursive_ones_taken(base):
    grammars = Grammars(base)
    for schema in EMPTY:
        with pytest.raises(BadField, match="cannot be used") as error:
            grammars.matcher(Request((5,), json_schema=json.dumps(schema)))
        assert error.value.field == "json_schema"
    for schema in RECURSIVE:
        assert grammars.matcher(Request((5,), json_schema=json.dumps(schema))) is not None


def test_hostile_grammars_cost_little(base):
    """Each is refused or compiled within seconds, and so is its first mask, which the engine's
    thread computes.
    """
    grammars = Grammars(base)
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    many = {
        f"d{i * 7919 % 3000}": {"allOf": [{"$ref": f"#/$defs/d{(i + 1) * 7919 % 3000}"}]}
        for i in range(3000)
    }
    schemas = [
        {"$defs": {**chain, "d60": {"type": "null"}}, "$ref": "#/$defs/d0"},
        {"$defs": {**chain, "d60": {"$ref": "#/$defs/d0"}}, "$ref": "#/$defs/d0"},
        {"$defs": many, "$ref": "#/$defs/d0"},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}},
        {"enum": [f"x{i}" for i in range(100_000)]},
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i + 50}]} for i in range(20)]},
        {"$ref": "http://127.0.0.1/schema"},
    ]
    asked = [Request((5,), json_schema=json.dumps(schema)) for schema in schemas]
    regexes = "(a{1000}){1000}", "(((((a*)*)*)*)*)*b", ".*(x+x+)+y"
    asked += [Request((5,), regex=regex) for regex in regexes]
    began, refused = time.monotonic(), 0
    for request in asked:
        try:
            mask_of(grammars.matcher(request), base.cfg.vocab_size)
        except UserError:
            refused += 1
    assert time.monotonic() - began < 30, "some 3 s on two busy cores"
    assert refused >= 5


def test_a_grammar_that_fails_on_the_way_fails_its_request_alone(rng, base):
    """The second mask of ``[bc](a{1000}){1000}`` is beyond the limits: no text that does not follow
    it is answered as if it did.
    """
    engine = Engine(base, base.need_tokenizer().decode, rows=(4,))
    free = Request((7, 8), max_tokens=6, seed=3)
    with engine.serving():
        stream = engine.submit(Request((5, 6), regex="[bc](a{1000}){1000}", n=2, max_tokens=20))
        other = engine.submit(free)
        with pytest.raises(UserError, match="the grammar failed during decoding"):
            stream.result(60)
        assert len(other.result(60)[0].tokens) > 0
    assert not engine.active.jobs
