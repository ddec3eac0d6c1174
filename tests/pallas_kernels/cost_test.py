"""Costs against counts made row by row."""

import jax
import numpy as np

from pallas_kernels import cost


def spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_what_is_present_counts_and_nothing_else(rng):
    """Row by row: every row once, every factor at its first row."""
    M, W, R, size = 50, 7, 4, 2
    factor = np.repeat(rng.integers(-1, W, 10), 5)
    x, onto = spec(M, 128), [spec(M, 256), spec(M, 384)]
    a, b = [spec(W, R, 128)] * 2, [spec(W, R, 256), spec(W, R, 384)]
    seen, rows, weights, flops, back_flops, back_rows = set(), 0, 0, 0, 0, 0
    for w in factor:
        if w < 0:
            continue
        rows += (128 + 2 * (256 + 384)) * size
        back_rows += (3 * 128 + 256 + 384) * size
        for n in (256, 384):
            flops += 2 * R * 128 + 2 * R * n
            # h and dh, da and db, dx
            back_flops += 2 * R * (128 + n) + 2 * R * (128 + n) + 2 * R * 128
            weights += 0 if w in seen else (R * 128 + R * n) * size
        seen.add(w)
    assert cost.packed_lora(x, a, b, onto, factor) == (flops, rows, weights)
    back = cost.packed_lora(x, a, b, onto, factor, backward=True)
    assert back == (back_flops, back_rows, 2 * weights)
    most, few = W * R * 2 * (128 + 320) * size, [spec(3, 256), spec(3, 384)]
    assert cost.packed_lora(x, a, b, onto).weights == most, "no more factors than there are"
    assert cost.packed_lora(spec(3, 128), a, b, few).weights == most * 3 // W, "nor than rows"
