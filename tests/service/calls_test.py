"""Calls and results come back from their bytes as they were."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.service import calls
from mint_jax.service.calls import ForwardBackward, Trained
from tests.train.blocks_test import datum
from tests.train.live_test import LOSSES, coefs


def same(one, two):
    if one is None or two is None:
        return one is two
    return (
        one.dtype == two.dtype
        and one.shape == two.shape
        and np.array_equal(one, two, equal_nan=True)
    )


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(sorted(LOSSES)),
    st.integers(0, 2**31),
)
def test_data_of_any_shapes_come_back(rows, kind, seed):
    rng = np.random.default_rng(seed)
    data = []
    for n, width, sampled, routed in rows:
        fields = (
            {
                "advantages": rng.normal(size=n).astype(np.float32),
                "old_logp": rng.normal(size=n).astype(np.float32),
            }
            if sampled
            else {}
        )
        fields |= (
            {"in_ratio": (rng.random(n) < 0.5).astype(np.float32)} if sampled and n % 2 else {}
        )
        data.append(datum(rng, n, width, routed, **fields))
    call = ForwardBackward(data, coefs(kind), bool(seed % 2))
    name, body = calls.encode(call)
    again = calls.decode(name, body)
    assert (again.loss, again.backward, len(again.data)) == (call.loss, call.backward, len(data))
    for one, two in zip(again.data, data):
        assert all(
            same(getattr(one, f.name), getattr(two, f.name)) for f in dataclasses.fields(two)
        )
    assert calls.encode(again) == (name, body), "the digest of a repeated request is the same"
    result = Trained(
        [rng.normal(size=d.targets.shape).astype(np.float32) for d in data], float(rng.normal())
    )
    back = calls.decode_result(calls.encode_result(result))
    assert back.loss == result.loss
    assert all(same(*pair) for pair in zip(back.logprobs, result.logprobs, strict=True))
