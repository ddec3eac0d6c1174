"""How two revisions differ: their schemas, and for each projection how far apart the changes of the
weights are.

A projection's change is ``scale * A^T B``, ``[D, F]``; its Frobenius norm, and that of a difference
of two, is found without forming it. With the thin QR of both revisions' stacked factors, ``[A1;
A2]^T = Q R`` and ``[s1 B1; s2 B2]^T = P S``, the first change is ``Q (R1 S1^T) P^T`` and the second
``Q (R2 S2^T) P^T``, R1 and R2 being R's columns of either revision: the same rotation of two
matrices of at most twice the rank. Unlike a difference of Gram matrices this does not cancel where
the two are close. Factors alone would not show that: many A and B have one product.

Axes: L layers, E experts, R rank, D in, F out.
"""

import argparse
import json
import math
from typing import Any

import numpy as np

from mint_jax import nested
from mint_jax.catalog.cli.listing import find_revision
from mint_jax.catalog.cli.output import Result, table
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, unpack


def run(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Compares two revisions."""
    a, b = (
        find_revision(catalog, name if "@" in name else catalog.resolve(name).digest)
        for name in (args.a, args.b)
    )
    names = [f"{one.policy}@{one.number}" for one in (a, b)]
    (first, schema_a), (second, schema_b) = (unpack(catalog.load(one.digest)) for one in (a, b))
    changed = schema_difference(schema_a, schema_b)
    rows = compare(first, schema_a.config.scale, second, schema_b.config.scale)
    data = {
        "a": a,
        "b": b,
        "same_bytes": a.digest == b.digest,
        "schema": changed,
        "projections": rows,
    }
    parts: list = []
    if a.digest == b.digest:
        parts.append(f"{names[0]} and {names[1]} have the same bytes, {a.digest[:12]}")
    if changed:
        shown = ((name, json.dumps(one), json.dumps(two)) for name, (one, two) in changed.items())
        parts.append(table("schema", ("field", names[0], names[1]), shown))
    columns = (
        "projection",
        f"#norm of {names[0]}",
        f"#norm of {names[1]}",
        "#norm of difference",
        "#cosine",
        "note",
    )
    cells = [
        tuple(
            row[key]
            for key in ("projection", "norm_a", "norm_b", "norm_difference", "cosine", "note")
        )
        for row in rows
    ]
    return Result(data, [*parts, table("change of the weights, scale * B A", columns, cells)])


def schema_difference(a: Schema, b: Schema) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, with both values."""
    one, two = json.loads(a.to_json()), json.loads(b.to_json())
    return {name: (one[name], two[name]) for name in one if one[name] != two[name]}


def compare(a: Any, scale_a: float, b: Any, scale_b: float) -> list[dict[str, Any]]:
    """One row per projection and one for all of them together, each over all layers and experts.

    A projection that only one of them has counts as zero in the other. ``norm_difference`` and
    ``cosine`` are None where the shapes do not allow them; ``cosine`` also where one of the two is
    zero.
    """
    flat_a, flat_b = (dict(nested.leaves_with_path(tree)) for tree in (a, b))
    rows, whole = [], np.zeros(4)
    comparable = True
    for path in sorted({leaf.rsplit("/", 1)[0] for leaf in [*flat_a, *flat_b]}):
        one, two = _factors(flat_a, path), _factors(flat_b, path)
        note = "only in the first" if two is None else "only in the second" if one is None else ""
        if one is not None and two is not None and _ends(one) != _ends(two):
            note, comparable = f"shapes differ: {_ends(one)}, {_ends(two)}", False
            squares = np.array(
                [
                    _squares(one, scale_a, None, 1.0)[0],
                    _squares(two, scale_b, None, 1.0)[0],
                    np.nan,
                    np.nan,
                ]
            )
            whole[:2] += squares[:2]
        elif one is None:
            assert two is not None
            mine = _squares(two, scale_b, None, 1.0)[0]
            squares = np.array([0.0, mine, mine, 0.0])
            whole += squares
        else:
            squares = _squares(one, scale_a, two, scale_b)
            if two is not None and scale_a == scale_b and all(map(np.array_equal, one, two)):
                squares[2:] = 0.0, squares[0]  # without rounding
            whole += squares
        rows.append(_row(path, squares, note))
    if not comparable:
        whole[2:] = np.nan
    return [*rows, _row("all", whole, "")]


def _row(path: str, squares: np.ndarray, note: str) -> dict[str, Any]:
    one, two, difference, inner = (float(value) for value in squares)
    cosine = (
        inner / math.sqrt(one * two) if one > 0 and two > 0 and math.isfinite(one * two) else None
    )
    if cosine is not None and not math.isfinite(cosine):
        cosine = None
    norms = [math.sqrt(value) if math.isfinite(value) else None for value in (one, two, difference)]
    names = ("norm_a", "norm_b", "norm_difference")
    return {
        "projection": path,
        **dict(zip(names, norms)),
        "cosine": None if cosine is None else max(-1.0, min(1.0, cosine)),
        "note": note,
    }


Factors = tuple[np.ndarray, np.ndarray]


def _factors(flat: dict[str, np.ndarray], path: str) -> Factors | None:
    """A ``[..., R, D]`` and B ``[..., R, F]`` of a projection."""
    return (flat[f"{path}/a"], flat[f"{path}/b"]) if f"{path}/a" in flat else None


def _ends(factors: Factors) -> tuple[int, ...]:
    a, b = factors
    return (*a.shape[:-2], a.shape[-1], b.shape[-1])


def _squares(one: Factors, scale_one: float, two: Factors | None, scale_two: float) -> np.ndarray:
    """Squared norms of both products and of their difference, and their inner product, summed over
    layers and experts.
    """
    total = np.zeros(4)
    for layer in range(one[0].shape[0]):  # in double precision: a layer at a time
        a = one[0][layer].astype(np.float64)
        b = one[1][layer].astype(np.float64) * scale_one
        rank = a.shape[-2]
        if two is not None:
            a = np.concatenate([a, two[0][layer].astype(np.float64)], axis=-2)
            b = np.concatenate([b, two[1][layer].astype(np.float64) * scale_two], axis=-2)
        r, s = _triangle(a), _triangle(b)
        first = r[..., :rank] @ np.swapaxes(s[..., :rank], -1, -2)
        second = r[..., rank:] @ np.swapaxes(s[..., rank:], -1, -2)
        total += [
            (first**2).sum(),
            (second**2).sum(),
            ((first - second) ** 2).sum(),
            (first * second).sum(),
        ]
    return total


def _triangle(factors: np.ndarray) -> np.ndarray:
    """R of the thin QR of ``[..., R, D]``, transposed."""
    return np.linalg.qr(np.swapaxes(factors, -1, -2), mode="r")  # type: ignore[return-value]
