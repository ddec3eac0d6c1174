"""Finite as integers equals finite as floats, for every kind of value in every dtype and layout."""

import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.lora import finite
from mint_jax.lora.finite import all_finite

DTYPES = [np.float32, jnp.bfloat16, np.float16, np.float64, np.int32]


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("others", [-1, 0, 1])
def test_one_bad_value_is_found_anywhere(rng, dtype, value, others, monkeypatch):
    monkeypatch.setattr(finite, "_PIECE", 8)
    x = np.full((4, 6), others, dtype)
    x.reshape(-1)[rng.integers(x.size)] = value
    assert not all_finite(x)
    assert not all_finite(x.T)


def test_every_bit_pattern_of_16_bits():
    bits = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (np.float16, jnp.bfloat16):
        values = bits.view(dtype)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            wanted = np.isfinite(values).tolist()
        assert [all_finite(v) for v in values[:, None]] == wanted
