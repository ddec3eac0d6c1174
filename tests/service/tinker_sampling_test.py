"""Sampling by the official SDK: what is drawn, what is told of it, when it stops; by torch's logits
over the same weights.
"""

import pickle

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests import oracles
from tests.service.sites import logprobs_of
from tests.service.sites import site as site
from tests.service.sites import sites as sites
from tests.train.live_test import random_state

pytestmark = pytest.mark.long

CLOSE = 5e-5  # float32 through three layers, at log-probabilities of about 5


@pytest.fixture(scope="module")
def bare(site):
    """A sampler of the bare base."""
    return site.client().create_sampling_client(base_model=site.server.name).result()


@pytest.fixture(scope="module")
def logprobs(hf_dirs):
    """``logprobs(tokens, temperature)`` -> ``[N, V]`` of torch."""
    model = oracles.torch_model(hf_dirs("llama"))
    return lambda tokens, temperature=1.0: torch.log_softmax(
        torch.tensor(oracles.torch_logits(model, np.array([tokens]))[0]) / temperature, -1
    ).numpy()


def ints(tokens):
    return types.ModelInput.from_ints([int(token) for token in tokens])


def params(**told):
    return types.SamplingParams(**{"max_tokens": 8, "seed": 1} | told)


def drawn(answer):
    return [sequence.tokens for sequence in answer.sequences]


def test_a_seed_names_its_samples(bare, rng):
    prompt = ints(rng.integers(3, 97, 5))
    one, same, other, first = (
        bare.sample(prompt, n, params(seed=seed)) for n, seed in ((4, 3), (4, 3), (4, 4), (1, 3))
    )
    assert drawn(one.result()) == drawn(same.result())
    assert drawn(one.result()) != drawn(other.result())
    assert drawn(first.result()) == drawn(one.result())[:1]
    assert len({tuple(tokens) for tokens in drawn(one.result())}) == 4
    answers = [future.result() for future in (one, same, other, first)]
    ids = {sequence.sequence_id for answer in answers for sequence in answer.sequences}
    assert len(ids) == 13
    assert {sequence.stop_reason for sequence in one.result().sequences} == {"length"}
    free = types.SamplingParams(max_tokens=8)
    unseeded = [drawn(bare.sample(prompt, 1, free).result()) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_token_s_log_probability_is_that_of_what_drew_it(temperature, bare, rng, logprobs):
    prompt = rng.integers(3, 97, 5).tolist()
    options = params(temperature=temperature)
    answer = bare.sample(ints(prompt), 2, options, topk_sample_logprobs=3).result()
    for sequence in answer.sequences:
        told = logprobs(prompt + sequence.tokens, temperature)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(sequence.logprobs, told[range(8), sequence.tokens], atol=CLOSE)
        plain = logprobs(prompt + sequence.tokens)[len(prompt) - 1 : -1]
        assert sequence.topk_logprobs_np.token_ids.shape == (8, 3)
        likeliest = -np.sort(-plain, -1)[:, :3]
        np.testing.assert_allclose(sequence.topk_logprobs_np.logprobs, likeliest, atol=CLOSE)


def test_a_prompt_s_log_probabilities_in_every_form(bare, rng, logprobs):
    prompt = rng.integers(3, 97, 9).tolist()
    wanted = rng.integers(3, 97, (8, 3))
    wanted[2, 1] = wanted[5] = -1
    answer = bare.sample(
        ints(prompt), 1, params(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=4,  # noqa: E501
        target_prompt_logprobs=types.TensorData.from_numpy(wanted),
    ).result()  # fmt: skip
    told = logprobs(prompt)[:-1]
    assert answer.prompt_logprobs[0] is None
    np.testing.assert_allclose(answer.prompt_logprobs[1:], told[range(8), prompt[1:]], atol=CLOSE)
    top, named = answer.topk_prompt_logprobs_np, answer.target_prompt_logprobs.to_numpy()
    assert top.token_ids.shape == (9, 2)
    assert answer.topk_prompt_logprobs[0] is None
    alternatives = answer.prompt_alt_tokens.tokens.to_numpy().astype(np.int64)
    assert alternatives.shape == (8, 4)
    assert len({tuple(row) for row in alternatives.tolist()}) > 1
    for found, ids in (
        (top.logprobs[1:], np.argsort(-told, -1)[:, :2]),
        (top.logprobs[1:], top.token_ids[1:]),
        (np.where(wanted < 0, np.nan, named), np.maximum(wanted, 0)),
        (answer.prompt_alt_tokens.logprobs.to_numpy(), alternatives),
    ):
        expected = np.where(np.isnan(found), np.nan, np.take_along_axis(told, ids, 1))
        np.testing.assert_allclose(found, expected, atol=CLOSE)
    assert (named[wanted < 0] == 0).all()
    last = bare.compute_logprobs(ints(prompt), prompt_logprobs_last_n=3).result()
    assert last[:6] == [None] * 6
    np.testing.assert_allclose(last[6:], answer.prompt_logprobs[6:], atol=CLOSE)


def test_the_sampler_s_log_probabilities_are_the_trainer_s(site, rng):
    trainer = site.trainer()
    site.put(trainer, random_state(rng, site.server.base, site.held(trainer).config))
    sampler = trainer.save_weights_and_get_sampling_client()
    prompt = rng.integers(3, 97, 6).tolist()
    (sequence,) = sampler.sample(ints(prompt), 1, params()).result().sequences
    whole = prompt + sequence.tokens
    inputs = {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
    datum = types.Datum(ints(whole[:-1]), inputs)
    (told,) = logprobs_of(trainer.forward([datum], "cross_entropy").result())
    np.testing.assert_allclose(sampler.compute_logprobs(ints(whole)).result()[1:], told, atol=CLOSE)
    np.testing.assert_allclose(sequence.logprobs, told[len(prompt) - 1 :], atol=CLOSE)


def test_inflight_samplers_of_a_policy_move_to_its_newest_save(site, rng):
    client, prompt = site.client(), ints(rng.integers(3, 97, 6))
    trainer, other = (site.trainer(client=client) for _ in range(2))
    for one in (trainer, other):
        site.put(one, random_state(rng, site.server.base, site.held(one).config))

    def saved(of, kind):
        return of.save_weights_and_get_sampling_client(kind=kind).result()

    def sampled(sampler):
        (sequence,) = sampler.sample(prompt, 1, params()).result().sequences
        return sequence.tokens, sequence.logprobs

    samplers = [saved(trainer, "inflight"), saved(other, "inflight"), saved(trainer, "snapshot")]
    first = [sampled(one) for one in samplers]
    assert first[0] == first[2] != first[1]
    site.put(trainer, random_state(rng, site.server.base, site.held(trainer).config))
    assert [sampled(one) for one in samplers] == first, "nothing was saved"
    newest, now = saved(trainer, "inflight"), saved(trainer, "snapshot")
    assert sampled(samplers[0]) == sampled(newest) == sampled(now) != first[0]
    assert [sampled(one) for one in samplers[1:]] == first[1:]
    place = {"model_id": trainer.model_id, "seq_id": 5, "kind": "inflight", "path": "named"}
    answer = site.post("save_weights_for_sampler", place).json()
    refused = site.retrieve(answer["request_id"]).json()
    assert refused["error"].startswith("kind inflight has no path")


def test_clones_of_a_sampler_have_numbers_of_their_own(bare, rng):
    prompt = ints(rng.integers(3, 97, 5))
    expected = drawn(bare.sample(prompt, 1, params()).result())
    clones = [
        pickle.loads(pickle.dumps(bare)),
        tinker.SamplingClient.from_sampler_handle(bare.get_sampler_handle(), api_key="tml-x"),
    ]
    futures = [clone.sample(prompt, 1, params()) for clone in clones for _ in range(2)]
    assert [drawn(future.result()) for future in futures] == [expected] * 4


def asked(site, sampler, place, **told):
    prompt = {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]}
    body = {"sampling_session_id": sampler, "seq_id": place, "num_samples": 1, "prompt": prompt}
    return site.post("asample", body | told)


def sampler_of(site):
    """A raw sampling session of the base."""
    session = site.post("create_session", {}).json()["session_id"]
    told = {"session_id": session, "sampling_session_seq_id": 0, "base_model": site.server.name}
    sampler = site.post("create_sampling_session", told).json()["sampling_session_id"]
    assert site.post("create_sampling_session", told).json()["sampling_session_id"] == sampler
    return sampler


def test_a_sample_sent_again_is_the_same(site):
    sampler, small = sampler_of(site), {"sampling_params": {"max_tokens": 3}}
    one, same = (asked(site, sampler, 0, **small).json() for _ in range(2))
    assert one == same
    assert asked(site, sampler, 0, sampling_params={"max_tokens": 4}).status_code == 409
    assert site.retrieve(one["request_id"]).json() == site.retrieve(one["request_id"]).json()
    assert len(site.retrieve(one["request_id"]).json()["sequences"][0]["tokens"]) == 3
    assert site.post("retrieve_future", {"request_id": "a-nothing"}).status_code == 410
    assert asked(site, "nobody:sample:0", 0, **small).status_code == 404
    wrong = asked(site, sampler, 1, sampling_params={"max_tokens": 3, "temperature": -1}).json()
    failed = site.retrieve(wrong["request_id"]).json()
    assert failed["category"] == "user"
    assert "temperature is -1.0; expected 0 <= temperature" in failed["error"]
    found = httpx.get(f"{site.url}/api/v1/samplers/{sampler}").json()
    assert found["base_model"] == site.server.name


def test_a_sample_can_be_cancelled(site):
    sampler, many = sampler_of(site), {"num_samples": 8, "sampling_params": {"max_tokens": 250}}
    # The last wait behind 88 samples: with one of each request all were done before they could be
    # cancelled, on a fast machine.
    ids = [asked(site, sampler, i, **many).json()["request_id"] for i in range(12)]
    cancel = {"request_id": ids[0], "request_ids": ["a-nothing"]}
    assert site.post("cancel_future", cancel).status_code == 410  # and cancels nothing
    cancel = {"request_id": ids[-1], "request_ids": [ids[-2]]}
    assert site.post("cancel_future", cancel).status_code == 200
    for id in ids[-2:]:
        answer = site.retrieve(id).json()
        assert answer["category"] == "user"
        assert "this sample was cancelled before it was done" in answer["error"]
    assert len(site.retrieve(ids[0]).json()["sequences"][0]["tokens"]) == 250
