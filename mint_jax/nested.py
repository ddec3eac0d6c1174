"""Nested dicts by path: ``{"dense": {"q": x}}`` and ``"dense/q"``. Imports no jax, so that light
programs start at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

Tree = Any  # a nested dict of anything


def leaves_with_path(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ``("dense/attn/q/w", leaf)`` of a nested dict."""
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield from leaves_with_path(child, f"{prefix}/{name}" if prefix else name)
    else:
        yield prefix, tree


def map_with_path(fn: Callable[[str, Any], Any], tree: Tree, prefix: str = "") -> Tree:
    """Maps ``fn(path, leaf)`` over a nested dict, keeping its structure."""
    if isinstance(tree, dict):
        return {
            name: map_with_path(fn, child, f"{prefix}/{name}" if prefix else name)
            for name, child in tree.items()
        }
    return fn(prefix, tree)


def nest(flat: dict[str, Any]) -> Tree:
    """Builds a nested dict: ``{"dense/attn/q": x}`` -> ``{"dense": {"attn": {"q": x}}}``."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree
