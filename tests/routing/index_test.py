"""The index of policies against a comparison of all in float64."""

import numpy as np
import pytest

from mint_jax.routing import index as module
from mint_jax.routing.index import RouteIndex

DIMS = 24


def expected(kept: dict, mean: np.ndarray, query: np.ndarray) -> dict:
    """The cosine of every policy in float64."""

    def centred(vector):
        vector = np.asarray(vector, np.float64) - mean
        return vector / np.linalg.norm(vector)

    return {key: float(centred(vector) @ centred(query)) for key, vector in kept.items()}


def half(rng, *shape):
    return rng.normal(size=shape).astype(np.float16)


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_all_policies_are_compared_while_they_are_few(rng, count):
    index, vectors = RouteIndex(DIMS), half(rng, count, DIMS)
    index.put([f"p{i}" for i in range(count)], vectors)
    kept = {f"p{i}": vector for i, vector in enumerate(vectors)}
    mean = vectors.mean(0, dtype=np.float64)
    query = rng.normal(size=DIMS).astype(np.float32)
    found = index.nearest(query, 5)
    if count == 1:
        assert [one.key for one in found] == ["p0"]
        assert abs(found[0].cosine) < 1e-3, "nothing but the mean is known"
        return
    wanted = expected(kept, mean, query)
    best = sorted(wanted, key=wanted.__getitem__, reverse=True)[:5]
    assert [one.key for one in found] == best
    # means and products in float32
    np.testing.assert_allclose([f.cosine for f in found], [wanted[k] for k in best], atol=1e-5)


def test_replaced_and_removed_policies_are_found_no_more(rng):
    index, kept = RouteIndex(DIMS), {}
    for _ in range(60):
        key, vector = int(rng.integers(20)), half(rng, DIMS)
        if rng.random() < 0.3:
            index.remove(key)
            kept.pop(key, None)
        else:
            index.put([key], vector[None])
            kept[key] = vector
        assert len(index) == len(kept)
        query = rng.normal(size=DIMS).astype(np.float32)
        found = index.nearest(query, 3)
        wanted = expected(kept, np.asarray(index._mean, np.float64), query)
        best = sorted(wanted, key=wanted.__getitem__, reverse=True)[:3]
        assert [one.key for one in found] == best
    index.put([], np.zeros((0, DIMS)))
    assert len(index) == len(kept)
    assert RouteIndex(DIMS).nearest(query, 3) == []


def test_many_policies_are_found_in_cells(rng, monkeypatch):
    """A query near a policy finds it, also a policy that was added after the cells were fitted."""
    monkeypatch.setattr(module, "EXACT", 100)
    monkeypatch.setattr(module, "REDUCED", 16)
    index = RouteIndex(DIMS)
    centres = 3 * rng.normal(size=(40, DIMS))
    vectors = (centres[rng.integers(40, size=3000)] + rng.normal(size=(3000, DIMS))).astype("f2")
    index.put([*range(2000)], vectors[:2000])
    index.put([*range(2000, 3000)], vectors[2000:])
    hits = 0
    for key in rng.integers(3000, size=200).tolist():
        query = vectors[key].astype(np.float32) + 0.05 * rng.normal(size=DIMS).astype(np.float32)
        [best, *_] = index.nearest(query, 4)
        hits += best.key == key
    assert hits >= 170, hits  # of 150 seeds half have 194 or more, none fewer than 184
    index.remove(7)
    assert all(one.key != 7 for one in index.nearest(vectors[7].astype(np.float32), 20))
