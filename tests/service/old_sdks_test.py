"""Requests of SDKs before protobuf: JSON alone, ``forward`` on a route of its own, resuming in two
steps.
"""

import numpy as np
import pytest

from tests.service.old_wire import adam, datum
from tests.service.old_wire import old as old
from tests.service.sites import sites as sites

pytestmark = pytest.mark.long

N = 12


def batch(rng, old, count: int = 2) -> dict:
    """A request's input, for cross-entropy."""
    vocab = old.server.base.cfg.vocab_size
    rows = [rng.integers(0, vocab, N + 1) for _ in range(count)]
    data = [
        datum(row, target_tokens=row[1:], weights=rng.normal(size=N).astype(np.float32))
        for row in rows
    ]
    return {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": None}


def logprobs(result: dict) -> np.ndarray:
    for output in result["loss_fn_outputs"]:
        assert output["logprobs"]["dtype"] == "float32"
        assert output["logprobs"]["shape"] == [N]
    return np.array([output["logprobs"]["data"] for output in result["loss_fn_outputs"]])


def trained(rng, old, rank: int = 4) -> str:
    """A model after an update."""
    model = old.create(rank)
    old.train("forward_backward", model, forward_backward_input=batch(rng, old))
    old.train("optim_step", model, **adam(0.05))
    return model


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
    sampler = old.post("create_sampling_session", opened)["sampling_session_id"]
    named = {"sampling_session_id": sampler, "seq_id": 0, "base_model": None, "model_path": None}
    answers = [
        old.result("asample", told | where)
        for where in ({"model_path": path, "base_model": None}, named)
    ]
    assert answers[0] == answers[1], "a path and a session of it are the same weights"
    found = answers[0]
    assert found["type"] == "sample"
    for sequence in found["sequences"]:
        lengths = len(sequence["tokens"]), len(sequence["logprobs"])
        assert (sequence["stop_reason"], *lengths) == ("length", 4, 4)
    scored = {
        "data": [datum(row, target_tokens=row[1:], weights=np.ones(N, np.float32))],
        "loss_fn": "cross_entropy",
    }
    passed = logprobs(old.train("forward", model, forward_input=scored))[0]
    assert found["prompt_logprobs"][0] is None
    # other programs, other orders of float32 sums
    np.testing.assert_allclose(found["prompt_logprobs"][1:], passed, atol=2e-4)
    assert found["topk_prompt_logprobs"][0] is None
    assert [len(place) for place in found["topk_prompt_logprobs"][1:]] == [2] * N
    base = old.result("asample", told | {"base_model": old.server.name, "model_path": None})
    assert not np.allclose(base["prompt_logprobs"][1:], passed, atol=2e-4)
