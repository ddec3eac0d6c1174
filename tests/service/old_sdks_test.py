"""Requests of SDKs before protobuf: JSON alone, ``forward`` on a route of its own."""

import numpy as np
import pytest

from tests.service.old_wire import N, datum, trained
from tests.service.old_wire import old as old
from tests.service.sites import sites as sites

pytestmark = pytest.mark.long


def test_samples_are_told_in_json(old, rng):
    model = trained(rng, old)
    path = old.train("save_weights_for_sampler", model, path="sampled")["path"]
    row = rng.integers(0, old.server.base.cfg.vocab_size, N + 1)
    chunks = [{"tokens": row[:5].tolist()}, {"type": "encoded_text", "tokens": row[5:].tolist()}]
    params = {
        "max_tokens": 4,
        "seed": 3,
        "stop": None,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }
    told = {"prompt": {"chunks": chunks}, "num_samples": 2, "sampling_params": params}
    told |= {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "type": "sample"}
    opened = {"session_id": old.session, "sampling_session_seq_id": 0}
    opened |= {"base_model": None, "model_path": path}
    sampler = old.done("create_sampling_session", opened)["sampling_session_id"]
    named = {"sampling_session_id": sampler, "seq_id": 0, "base_model": None, "model_path": None}
    by_path, found = (
        old.done("asample", told | where)
        for where in ({"model_path": path, "base_model": None}, named)
    )
    assert by_path == found, "a path and a session of it are the same weights"
    assert found["type"] == "sample"
    for sequence in found["sequences"]:
        lengths = len(sequence["tokens"]), len(sequence["logprobs"])
        assert (sequence["stop_reason"], *lengths) == ("length", 4, 4)
    data = [datum(row, target_tokens=row[1:], weights=np.ones(N, np.float32))]
    scored = {"data": data, "loss_fn": "cross_entropy"}
    [output] = old.train("forward", model, forward_input=scored)["loss_fn_outputs"]
    assert (output["logprobs"]["dtype"], output["logprobs"]["shape"]) == ("float32", [N])
    passed = output["logprobs"]["data"]
    assert found["prompt_logprobs"][0] is None
    # other programs, other orders of float32 sums
    np.testing.assert_allclose(found["prompt_logprobs"][1:], passed, atol=2e-4)
    assert found["topk_prompt_logprobs"][0] is None
    assert [len(place) for place in found["topk_prompt_logprobs"][1:]] == [2] * N
    base = old.done("asample", told | {"base_model": old.server.name, "model_path": None})
    assert not np.allclose(base["prompt_logprobs"][1:], passed, atol=2e-4)
