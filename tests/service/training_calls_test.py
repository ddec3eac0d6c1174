"""Training calls and results equal themselves after they were written and read."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.service import training_calls as codec
from mint_jax.service.training_calls import ForwardBackward, Trained
from tests.train.blocks_test import datum
from tests.train.live_test import LOSSES, coefs

ROWS = st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans(), st.booleans())


def same(one, two):
    if one is None or two is None:
        return one is two
    return one.dtype == two.dtype and one.shape == two.shape and np.array_equal(one, two)


@settings(max_examples=60)
@given(
    st.lists(ROWS, min_size=1, max_size=6),
    st.sampled_from(sorted(LOSSES)),
    st.integers(0, 2**31),
)
def test_data_of_any_shapes_are_read_as_written(rows, kind, seed):
    rng, data = np.random.default_rng(seed), []
    for n, width, sampled, routed in rows:
        names = ("advantages", "old_logp") if sampled else ()
        fields = {name: rng.normal(size=n).astype(np.float32) for name in names}
        if sampled and n % 2:
            fields["in_ratio"] = (rng.random(n) < 0.5).astype(np.float32)
        data.append(datum(rng, n, width, routed, **fields))
    inputs = [{"mask": d.weights, "beta": np.float32(seed)} for d in data] if seed % 3 else ()
    custom = "id" if seed % 3 else None
    call = ForwardBackward(data, coefs(kind), bool(seed % 2), None, custom, inputs)
    name, body = codec.encode(call)
    again = codec.decode(name, body)
    assert (again.loss, again.backward, len(again.data)) == (call.loss, call.backward, len(data))
    assert again.custom == custom
    for one, two in zip(again.inputs, inputs, strict=True):
        assert all(same(one[name], np.asarray(two[name])) for name in two)
    for one, two in zip(again.data, data):
        for field in dataclasses.fields(two):
            assert same(getattr(one, field.name), getattr(two, field.name))
    assert codec.encode(again) == (name, body), "a repeated request has the same digest"
    logprobs = [rng.normal(size=d.targets.shape).astype(np.float32) for d in data]
    result = Trained(logprobs, float(rng.normal()))
    back = codec.decode_result(codec.encode_result(result))
    assert back.loss == result.loss
    assert all(same(*pair) for pair in zip(back.logprobs, result.logprobs, strict=True))
