"""Schemas that refer to themselves: a search for the smallest value that fits is the oracle."""

from mint_jax.rollout.schemas import has_finite_value


def depth_of(schema, root, depth):
    """Whether a value of at most ``depth`` references and levels fits: follows every reference,
    without memory.
    """
    if depth == 0:
        return False
    if "$ref" in schema:
        return depth_of(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root, depth - 1)
    if "anyOf" in schema:
        return any(depth_of(part, root, depth - 1) for part in schema["anyOf"])
    if schema["type"] == "array":
        return schema.get("minItems", 0) == 0 or depth_of(schema["items"], root, depth - 1)
    if schema["type"] == "object":
        return all(
            depth_of(schema["properties"][name], root, depth - 1) for name in schema["required"]
        )
    return True


def test_random_schemas_have_a_finite_value_where_a_search_finds_one(rng):
    found = {True: 0, False: 0}
    for _ in range(300):
        names = [f"d{i}" for i in range(int(rng.integers(1, 5)))]

        def part(names=names):
            ref = {"$ref": "#/$defs/" + str(rng.choice(names))}
            other = {"$ref": "#/$defs/" + str(rng.choice(names))}
            kinds = [
                ref,
                {"anyOf": [ref, other]},
                {"type": "array", "items": ref, "minItems": int(rng.integers(0, 2))},
                {
                    "type": "object",
                    "properties": {"a": ref, "b": other},
                    "required": ["a", "b"][: int(rng.integers(1, 3))],
                },
                {"type": "null"},
            ]
            return kinds[int(rng.choice(5, p=[0.2, 0.25, 0.2, 0.25, 0.1]))]

        root = {"$defs": {name: part() for name in names}, "$ref": "#/$defs/d0"}
        right = depth_of(root, root, 12)
        assert has_finite_value(root) == right, root
        found[right] += 1
    assert min(found.values()) > 30
