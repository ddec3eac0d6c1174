"""The requests of MinT's own client: sums of sampler weights, and the reverse KL that is
refused.
"""

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


def told(paths, coefficients, name=None) -> dict:
    """As the client sends it."""
    kind = {"output_checkpoint_type": "sampler", "type": "mint_interpolate_checkpoints"}
    return {"source_paths": paths, "coefficients": coefficients, "output_path": name} | kind


def saved(rng, old, rank: int) -> tuple[str, str]:
    """A model and the path of its weights."""
    model = trained(rng, old, rank)
    return model, old.train("save_weights_for_sampler", model, path="own")["path"]


@pytest.fixture(scope="module")
def sources(old):
    rng = np.random.default_rng(5)
    return [saved(rng, old, rank) for rank in (4, 3, 4)]


def delta(old, path: str) -> dict[str, np.ndarray]:
    """Dense deltas of the weights at a path, as the catalog keeps them."""
    adapter, schema = unpack(
        old.server.checkpoints.fetch(old.server.checkpoints.digest("default", path))
    )
    flat = {name: np.float64(leaf) for name, leaf in params_lib.leaves_with_path(adapter)}
    return {
        name[:-2]: schema.config.scale * np.swapaxes(a, -1, -2) @ flat[name[:-1] + "b"]
        for name, a in flat.items()
        if name[-2:] == "/a"
    }


def scored(old, path: str, prompt: list[int]) -> list[float]:
    request = {
        "model_path": path,
        "prompt": {"chunks": [{"tokens": prompt}]},
        "num_samples": 1,
        "prompt_logprobs": True,
    }
    return old.result("asample", request | {"sampling_params": {"max_tokens": 1}})[
        "prompt_logprobs"
    ][1:]


def test_a_sum_is_a_checkpoint_of_the_first_source(old, sources):
    (model, first), (_, second), _ = sources
    made = old.result(PATH, told([first, second], [0.75, 0.5], "sum"))
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
    row = next(
        c
        for c in old.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
        if c["tinker_path"] == made["path"]
    )
    assert row["user_metadata"] == {"source_paths": [first, second], "coefficients": [0.75, 0.5]}


def test_a_sum_is_sampled(old, sources, rng):
    (_, first), (_, second), _ = sources
    prompt = rng.integers(0, old.server.base.cfg.vocab_size, N).tolist()
    made = old.result(PATH, told([first, second], [0.0, 1.0]))["path"]
    alone, other = scored(old, second, prompt), scored(old, first, prompt)
    # factors of another rank, another order of sums
    np.testing.assert_allclose(scored(old, made, prompt), alone, atol=1e-4)
    assert not np.allclose(alone, other, atol=1e-4)


def test_a_larger_sum_tells_what_it_left_out(old, sources):
    paths = [path for _, path in sources]
    made = old.result(PATH, told(paths, [0.5, 0.3, 0.2], "large"))
    assert made["rank"] == 8, "the largest that is sampled here"
    wanted, found = [delta(old, path) for path in paths], delta(old, made["path"])
    whole = {
        name: 0.5 * wanted[0][name] + 0.3 * wanted[1][name] + 0.2 * wanted[2][name]
        for name in found
    }
    left_out = sum(((found[name] - one) ** 2).sum() for name, one in whole.items())
    assert made["relative_error"] == pytest.approx(
        np.sqrt(left_out / sum((one**2).sum() for one in whole.values())), rel=1e-3
    )
    assert 0 < made["relative_error"] < 1


def test_the_same_request_again_is_the_same_and_a_taken_name_is_taken(old, sources):
    (_, first), (_, second), _ = sources
    once, again = (old.result(PATH, told([first, second], [0.5, 0.5], "twice")) for _ in range(2))
    assert once == again
    failed = old.result(PATH, told([first, second], [0.5, 0.25], "twice"))
    assert (failed["category"], "exists already" in failed["error"]) == ("user", True)


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"coefficients": [1.0]}, 400, "2 source_paths and 1 coefficients"),
        ({"source_paths": [], "coefficients": []}, 400, "expected at least 1 item"),
        ({"coefficients": [1.0, "2"]}, 400, "coefficients"),
        ({"output_checkpoint_type": "training"}, 400, "expected 'sampler'"),
        ({"output_path": "a/b"}, 400, "name"),
        ({"source_paths": ["tinker://none:train:0/sampler_weights/a"] * 2}, 404, "no checkpoint"),
        (
            {"source_paths": ["tinker://none:train:0/weights/a"] * 2},
            400,
            "save_weights_for_sampler",
        ),
        ({"source_paths": ["mint://a", "b"]}, 400, "expected tinker://"),
    ],
)
def test_what_cannot_be_summed_is_refused_at_once(old, sources, change, status, reason):
    paths = [path for _, path in sources[:2]]
    refused = old.send(PATH, told(paths, [0.5, 0.5]) | change)
    assert refused.status_code == status
    assert reason in refused.json()["detail"]


def test_the_sum_of_others_weights_has_no_place(old, sources):
    (_, first), (model, second), _ = sources
    book = old.server.book
    row = book.checkpoint("default", model, "sampler_weights", "own")
    book.add_checkpoint(dataclasses.replace(row, tenant="another", public=True))
    try:
        assert old.send(PATH, told([second, first], [0.5, 0.5])).status_code == 404
        assert "path" in old.result(PATH, told([first, second], [0.5, 0.5], "with-anothers"))
    finally:
        book.add_checkpoint(row)


@pytest.mark.parametrize("numbered", [True, False])
def test_the_reverse_kl_is_refused_and_uses_up_the_number_that_it_has(old, rng, numbered):
    model = old.create()
    place = old.numbers[model] + 1 if numbered else None
    row = {"chunks": [{"tokens": [1, 2, 3]}]}
    targets = {
        "target_tokens": {"data": [4], "dtype": "int64"},
        "weights": {"data": [1.0], "dtype": "float32"},
    }
    asked = {
        "model_id": model,
        "reference_model_path": "tinker://a:train:0/sampler_weights/b",
        "temperature": 1.0,
        "seq_id": place,
    }
    failed = old.result(
        "mint/forward_backward_reverse_kl",
        asked | {"data": [{"student_input": row, "reference_input": row} | targets]},
    )
    assert failed["category"] == "user"
    assert "importance_sampling" in failed["error"]
    old.numbers[model] += numbered
    old.train("forward_backward", model, forward_backward_input=batch(rng, old))
    assert "metrics" in old.train("optim_step", model, **adam(0.1))


def test_the_reverse_kl_of_a_model_that_is_not_there(old):
    assert (
        old.send(
            "mint/forward_backward_reverse_kl", {"model_id": "none", "seq_id": None}
        ).status_code
        == 404
    )
