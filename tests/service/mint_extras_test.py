"""Requests of MinT's own client: sums of sampler weights, and the reverse KL that is refused."""

import dataclasses

import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.catalog.packed import unpack
from tests.service.old_sdks_test import N, batch, trained
from tests.service.old_wire import adam
from tests.service.old_wire import old as old
from tests.service.sites import sites as sites

pytestmark = pytest.mark.long

PATH = "mint/checkpoints/interpolate"
REVERSE_KL = "mint/forward_backward_reverse_kl"


def body_of(paths, coefficients, name=None) -> dict:
    kind = {"output_checkpoint_type": "sampler", "type": "mint_interpolate_checkpoints"}
    return {"source_paths": paths, "coefficients": coefficients, "output_path": name} | kind


@pytest.fixture(scope="module")
def sources(old):
    """Two models and the paths of their weights."""
    rng = np.random.default_rng(5)
    models = [trained(rng, old, rank) for rank in (4, 3)]
    return [(m, old.train("save_weights_for_sampler", m, path="own")["path"]) for m in models]


def delta(old, path: str) -> dict[str, np.ndarray]:
    """Returns the dense deltas of the weights at a path."""
    digest = old.server.checkpoints.digest("default", path)
    adapter, schema = unpack(old.server.catalog.load(digest))
    flat = {name: np.float64(leaf) for name, leaf in params_lib.leaves_with_path(adapter)}
    return {
        name[:-2]: schema.config.scale * np.swapaxes(a, -1, -2) @ flat[name[:-1] + "b"]
        for name, a in flat.items()
        if name[-2:] == "/a"
    }


def scored(old, path: str, prompt: list[int]) -> list[float]:
    request = {"model_path": path, "prompt": {"chunks": [{"tokens": prompt}]}, "num_samples": 1}
    request |= {"prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
    return old.result("asample", request)["prompt_logprobs"][1:]


def test_a_sum_is_a_checkpoint_of_the_first_source_and_is_sampled(old, sources, rng):
    (model, first), (_, second) = sources
    made = old.result(PATH, body_of([first, second], [0.75, 0.5], "sum"))
    assert made == {
        "type": "mint_interpolate_checkpoints",
        "path": f"tinker://{model}/sampler_weights/sum",
        "checkpoint_type": "sampler",
        "source_paths": [first, second],
        "coefficients": [0.75, 0.5],
        "has_rank_shards": False,
        "rank": 8,
        "relative_error": 0.0,
    }
    found, a, b = (delta(old, path) for path in (made["path"], first, second))
    for name, one in found.items():
        np.testing.assert_allclose(one, 0.75 * a[name] + 0.5 * b[name], rtol=1e-4, atol=1e-6)
    rows = old.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    row = next(one for one in rows if one["tinker_path"] == made["path"])
    assert row["user_metadata"] == {"source_paths": [first, second], "coefficients": [0.75, 0.5]}
    again = (body_of([first, second], [0.75, c], "sum") for c in (0.5, 0.25))
    same, failed = (old.result(PATH, body) for body in again)
    assert same == made
    assert (failed["category"], "exists already" in failed["error"]) == ("user", True)
    prompt = rng.integers(0, old.server.base.cfg.vocab_size, N).tolist()
    second_only = old.result(PATH, body_of([first, second], [0.0, 1.0]))["path"]
    # factors of another rank sum in another order
    wanted = scored(old, second, prompt)
    np.testing.assert_allclose(scored(old, second_only, prompt), wanted, atol=1e-4)
    assert not np.allclose(wanted, scored(old, first, prompt), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"coefficients": [1.0]}, 400, "2 source_paths and 1 coefficients"),
        ({"output_checkpoint_type": "training"}, 400, "expected 'sampler'"),
        ({"output_path": "a/b"}, 400, "name"),
        ({"source_paths": ["tinker://none:train:0/sampler_weights/a"] * 2}, 404, "no checkpoint"),
        ({"source_paths": ["tinker://none:train:0/weights/a"] * 2}, 400, "sampler"),
    ],
)
def test_wrong_requests_are_refused_at_once(old, sources, change, status, reason):
    paths = [path for _, path in sources]
    refused = old.send(PATH, body_of(paths, [0.5, 0.5]) | change)
    assert refused.status_code == status
    assert reason in refused.json()["detail"]


def test_the_first_source_must_belong_to_the_tenant(old, sources):
    (_, first), (model, second) = sources
    book = old.server.book
    row = book.checkpoint("default", model, "sampler_weights", "own")
    book.add_checkpoint(dataclasses.replace(row, tenant="another", public=True))
    try:
        assert old.send(PATH, body_of([second, first], [0.5, 0.5])).status_code == 404
        assert "path" in old.result(PATH, body_of([first, second], [0.5, 0.5], "public"))
    finally:
        book.add_checkpoint(row)


@pytest.mark.parametrize("numbered", [True, False])
def test_the_reverse_kl_fails_and_uses_up_its_number(old, rng, numbered):
    assert old.send(REVERSE_KL, {"model_id": "none", "seq_id": None}).status_code == 404
    model = old.create()
    place = old.numbers[model] + 1 if numbered else None
    row = {"chunks": [{"tokens": [1, 2, 3]}]}
    datum = {"student_input": row, "reference_input": row}
    datum["target_tokens"] = {"data": [4], "dtype": "int64"}
    datum["weights"] = {"data": [1.0], "dtype": "float32"}
    reference = "tinker://a:train:0/sampler_weights/b"
    body = {"model_id": model, "reference_model_path": reference, "temperature": 1.0}
    failed = old.result(REVERSE_KL, body | {"seq_id": place, "data": [datum]})
    assert failed["category"] == "user"
    assert "importance_sampling" in failed["error"]
    old.numbers[model] += numbered
    old.train("forward_backward", model, forward_backward_input=batch(rng, old))
    assert "metrics" in old.train("optim_step", model, **adam(0.1))
