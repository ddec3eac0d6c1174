"""Detection of JSON schemas that refer to themselves and that no finite JSON matches.

``llguidance`` rejects other unsatisfiable schemas, but accepts ``{"type": "array", "items":
{"$ref": "#"}, "minItems": 1}``, whose completions never end.
"""

import urllib.parse
from typing import Any

from mint_jax.errors import UserError

MOST_STEPS = 200_000  # limit on visited parts of schemas


def has_finite_value(schema: Any) -> bool:
    """Returns True if the schema has a value in which no part must contain itself; schemas that
    constrain nothing do. Raises ``UserError`` if it has too many references to itself.

    The references with a finite value are a least fixed point: a reference is added once everything
    that its value must contain has a finite value.
    """
    targets = {ref: _target(schema, ref) for ref in _references(schema)}
    known: set[str] = set()
    steps = 0

    def has(part: Any) -> bool:
        nonlocal steps
        steps += 1
        if steps > MOST_STEPS:
            raise UserError("it has too many references to itself: use fewer")
        if not isinstance(part, dict):
            return part is not False
        if (ref := part.get("$ref")) in targets and ref not in known:
            return False
        if "const" in part or "enum" in part:
            return True
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list) and not any(map(has, part[key])):
                return False
        if isinstance(part.get("allOf"), list) and not all(map(has, part["allOf"])):
            return False
        return all(map(has, _contained(part)))

    left = list(targets)
    while new := [ref for ref in left if ref not in known and has(targets[ref])]:
        known.update(new)
        left = [ref for ref in reversed(left) if ref not in known]
    return has(schema)


def _contained(part: dict[str, Any]) -> list[Any]:
    """Returns the schemas of the values that every value of an object's or an array's schema
    contains.
    """
    if part.get("type") == "object" and isinstance(part.get("required"), list):
        named, other = part.get("properties"), part.get("additionalProperties", True)
        return [
            named.get(name, other) if isinstance(named, dict) else other
            for name in part["required"]
            if isinstance(name, str)
        ]
    if part.get("type") == "array" and isinstance(least := part.get("minItems"), int) and least > 0:
        first = part.get("prefixItems")
        first = first if isinstance(first, list) else []
        return [*first[:least], *([part.get("items", True)] if least > len(first) else [])]
    return []


def _references(schema: Any) -> list[str]:
    """Returns the references to parts of the schema itself."""
    found: dict[str, None] = {}
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if isinstance(ref := part.get("$ref"), str) and ref.startswith("#"):
                found[ref] = None
            left += part.values()
        elif isinstance(part, list):
            left += part
    return list(found)


def _target(schema: Any, ref: str) -> Any:
    """Returns the part that a reference names; True for an unknown name, which llguidance
    rejects.
    """
    part = schema
    for name in ref[1:].split("/")[1:]:
        name = urllib.parse.unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isascii() and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            return True
    return part
