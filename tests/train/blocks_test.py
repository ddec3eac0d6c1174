"""Data that live training refuses."""

import dataclasses

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.train.blocks import BlockShape, Datum, check


def datum(rng, n, width=0, routes=False, **fields):
    shape = (n, width) if width else (n,)
    tokens = rng.integers(3, 97, n).astype(np.int32)
    targets = rng.integers(3, 97, shape).astype(np.int32)
    made = {"routes": rng.integers(0, 4, (n, 2, 3)).astype(np.int16)} if routes else {}
    return Datum(tokens, targets, rng.normal(size=shape).astype(np.float32), **made | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": np.zeros(0, np.int32)}, "datum 1 has 0 tokens; .* send 1 to 20"),
        (
            {"tokens": np.zeros(21, np.int32)},
            "datum 1 has 21 tokens; .* at most 20",
        ),
        ({"tokens": np.array([1, -1, 2, 3])}, "datum 1 has -1 among its tokens"),
        ({"targets": np.array([1, 97, 2, 3])}, "datum 1 has 97 among its targets; .* 0 to 96"),
        ({"weights": np.float32([1, np.nan, 0, 0])}, "datum 1 has weights that are not finite"),
        ({"targets": np.full((4, 4), 5)}, "a datum has 4 targets a position; .* take at most 3"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(fields, message, rng, tiny_base):
    cfg = tiny_base().cfg
    shapes = [BlockShape(1, 1, 20), BlockShape(2, 1, 8), BlockShape(1, 1, 6, 3)]
    check([datum(rng, 4), datum(rng, 20)], cfg, shapes)
    check([datum(rng, 4), datum(rng, 6, 3)], cfg, shapes)
    with pytest.raises(UserError, match=message):
        check([datum(rng, 4), dataclasses.replace(datum(rng, 4), **fields)], cfg, shapes)
