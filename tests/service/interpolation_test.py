"""Requests of MinT's own client: merges of sampler weights, and the reverse KL that is refused."""

import dataclasses

import numpy as np
import pytest

from mint_jax.catalog.packed import unpack
from mint_jax.lora.merge import MergeConfig, merge
from tests.lora.merge_test import deltas
from tests.service.bad_world import Tenant, batch
from tests.service.sites import SIZES
from tests.service.sites import sites as sites

PATH = "mint/checkpoints/interpolate"
REVERSE_KL = "mint/forward_backward_reverse_kl"
N = 12  # tokens of a datum


def body_of(paths, coefficients, name=None) -> dict:
    kind = {"output_checkpoint_type": "sampler", "type": "mint_interpolate_checkpoints"}
    return {"source_paths": paths, "coefficients": coefficients, "output_path": name} | kind


@pytest.fixture(scope="module")
def old(sites, tiny_base):
    sizes = dataclasses.replace(SIZES, slots={4: 2}, adapters={4: 2, 8: 2})
    return Tenant(sites(tiny_base(), sizes=sizes))


def trained(old, number, rank) -> str:
    """A model after an update."""
    lora = {"rank": rank, "seed": number}
    model = old.done("create_model", old.new_model(number, lora_config=lora))["model_id"]
    data = batch(np.random.default_rng(number).integers(0, 97, N).tolist())
    old.train("forward_backward", model, forward_backward_input=data)
    old.train("optim_step", model, adam_params={"learning_rate": 0.05})
    return model


@pytest.fixture(scope="module")
def saved(old):
    """Two models and the paths of their weights."""
    models = [trained(old, i, rank) for i, rank in enumerate((4, 3))]
    return [(m, old.train("save_weights_for_sampler", m, path="own")["path"]) for m in models]


def delta(old, path: str) -> dict[str, np.ndarray]:
    adapter, schema = unpack(
        old.site.server.catalog.load(old.site.server.checkpoints.digest("default", path))
    )
    return deltas(adapter, schema.config)


def scored(old, path: str, prompt: list[int]) -> list[float]:
    request = {"model_path": path, "prompt": {"chunks": [{"tokens": prompt}]}, "num_samples": 1}
    request |= {"prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
    return old.result("asample", request)["prompt_logprobs"][1:]


@pytest.mark.long
def test_a_sum_is_a_checkpoint_of_the_first_source_and_is_sampled(old, saved, rng):
    (model, first), (_, second) = saved
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
    rows = old.send("GET", f"training_runs/{model}/checkpoints").json()["checkpoints"]
    row = next(one for one in rows if one["tinker_path"] == made["path"])
    assert row["user_metadata"] == {"source_paths": [first, second], "coefficients": [0.75, 0.5]}
    again = (body_of([first, second], [0.75, c], "sum") for c in (0.5, 0.25))
    same, failed = (old.result(PATH, body) for body in again)
    assert same == made
    assert (failed["category"], "exists already" in failed["error"]) == ("user", True)
    prompt = rng.integers(0, old.site.server.base.cfg.vocab_size, N).tolist()
    second_only = old.result(PATH, body_of([first, second], [0.0, 1.0]))["path"]
    # factors of another rank sum in another order
    wanted = scored(old, second, prompt)
    np.testing.assert_allclose(scored(old, second_only, prompt), wanted, atol=1e-4)
    assert not np.allclose(wanted, scored(old, first, prompt), atol=1e-4)


@pytest.mark.long
def test_ties_are_asked_for_by_further_fields(old, saved):
    paths, how = [path for _, path in saved], {"method": "ties", "density": 0.5, "seed": 3}
    made = old.result(PATH, body_of(paths, [1.0, 2.0]) | how | {"rank": 4})
    assert {name: made[name] for name in (*how, "rank")} == how | {"rank": 4}
    assert made["relative_error"] > 0
    loaded = [
        (adapter, schema.config)
        for adapter, schema in (
            unpack(old.site.server.catalog.load(old.site.server.checkpoints.digest("default", one)))
            for one in paths
        )
    ]
    wanted = merge(loaded, [1.0, 2.0], MergeConfig("ties", 0.5, 4, 3))
    for name, one in deltas(wanted.adapter, wanted.config).items():
        np.testing.assert_allclose(delta(old, made["path"])[name], one, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"coefficients": [1.0]}, 400, "2 source_paths and 1 coefficients"),
        ({"output_checkpoint_type": "training"}, 400, "expected 'sampler'"),
        ({"output_path": "a/b"}, 400, "name"),
        ({"method": "slerp"}, 400, "expected 'sum'"),
        ({"method": "ties", "density": 0}, 400, "density is 0"),
        ({"rank": 16}, 400, "adapters have at most 8"),
        ({"source_paths": ["tinker://none:train:0/sampler_weights/a"] * 2}, 404, "no checkpoint"),
        ({"source_paths": ["tinker://none:train:0/weights/a"] * 2}, 400, "sampler"),
    ],
)
def test_wrong_requests_are_refused_at_once(old, saved, change, status, reason):
    paths = [path for _, path in saved]
    refused = old.post(PATH, body_of(paths, [0.5, 0.5]) | change)
    assert refused.status_code == status
    assert reason in refused.json()["detail"]


@pytest.mark.long
def test_the_first_source_must_belong_to_the_tenant(old, saved):
    (_, first), (model, second) = saved
    book = old.site.server.book
    row = book.checkpoint("default", model, "sampler_weights", "own")
    book.add_checkpoint(dataclasses.replace(row, tenant="another", public=True))
    try:
        assert old.post(PATH, body_of([second, first], [0.5, 0.5])).status_code == 404
        assert "path" in old.result(PATH, body_of([first, second], [0.5, 0.5], "public"))
    finally:
        book.add_checkpoint(row)


@pytest.mark.long
def test_the_reverse_kl_fails_and_uses_up_its_number(old):
    assert old.post(REVERSE_KL, {"model_id": "none", "seq_id": 1}).status_code == 404
    model = trained(old, 2, 4)
    told = {"reference_model_path": "tinker://a:train:0/sampler_weights/b"}
    unnumbered = old.post(REVERSE_KL, told | {"model_id": model, "data": [], "seq_id": None})
    assert (unnumbered.status_code, "importance_sampling" in unnumbered.text) == (400, True)
    failed = old.train(REVERSE_KL, model, data=[], **told)
    assert (failed["category"], "importance_sampling" in failed["error"]) == ("user", True)
    old.train("forward_backward", model, forward_backward_input=batch())
    assert "metrics" in old.train("optim_step", model, adam_params={})
