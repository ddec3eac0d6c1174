"""A server that ends and one that goes on with its folder: what the official SDK's clients see of
it.
"""

import dataclasses

import pytest

from tests.service.sites import SIZES, adam, datum_of
from tests.service.sites import sites as sites
from tests.service.tinker_sampling_test import asked, drawn, ints, params, sampler_of
from tests.service.tinker_training_test import same_parts
from tests.train.live_test import random_data, random_optimizer, random_state

pytestmark = pytest.mark.long

# one shape of steps: the same requests are the same programs
ONE = dataclasses.replace(SIZES, shapes=SIZES.shapes[:1], every=2)


@pytest.fixture
def again(sites, tiny_base, tmp_path):
    """``again(site)`` ends a server; the next one has its folder and its port. ``again()`` is the
    first.
    """

    def make(site=None):
        if site is not None:
            site.close()
        return sites(tiny_base(), tmp_path / "server", ONE, 0 if site is None else site.port)

    return make


def batch(rng):
    return [datum_of(datum) for datum in random_data(rng, "cross_entropy", 12)]


def test_what_was_saved_to_be_sampled_is_there_for_good(again, rng):
    """Named or not, from the disk alone: its policy and its session are over. Clients from before
    go on, others begin.
    """
    site = again()
    client = site.client()
    trainer = site.trainer(client=client)
    prompt = ints(rng.integers(3, 97, 6))
    expected, samplers, paths = [], [], []
    for turn in range(3):  # more than there are slots
        site.put(trainer, random_state(rng, site.server.base, site.held(trainer).config))
        samplers.append(trainer.save_weights_and_get_sampling_client())
        paths.append(trainer.save_weights_for_sampler(f"s{turn}").result().path)
        expected.append(samplers[-1].sample(prompt, 2, params()).result())
    assert len({str(drawn(answer)) for answer in expected}) == 3
    assert site.post(f"sessions/{trainer.model_id.split(':')[0]}/finish", {}).status_code == 200
    site = again(site)
    assert not any(site.server.live.places().values())
    later = site.client()
    for answer, sampler, path in zip(expected, samplers, paths):
        for one in (sampler, later.create_sampling_client(model_path=path).result()):
            told = one.sample(prompt, 2, params()).result()
            assert drawn(told) == drawn(answer)
            assert [s.logprobs for s in told.sequences] == [s.logprobs for s in answer.sequences]


def test_training_goes_on_where_it_was(again, rng):
    """Gradients that pend are used, and the client's next numbers follow."""
    site = again()
    cut, whole = site.trainer(seed=5), site.trainer(seed=5)
    batches, numbers = [batch(rng) for _ in range(4)], [random_optimizer(rng) for _ in range(4)]

    def turn(trainer, i):
        gradients = trainer.forward_backward(batches[i], "cross_entropy")
        return gradients, trainer.optim_step(adam(numbers[i]))

    for i in range(4):
        for future in turn(whole, i):
            future.result()
    expected = site.held(whole)
    for i in range(3):
        for future in turn(cut, i):
            future.result()
    cut.forward_backward(batches[3], "cross_entropy").result()
    before = site.held(cut)
    assert "grad" in before.parts
    site = again(site)
    cut.forward(batches[0], "cross_entropy").result()  # it is behind whatever is done again
    same_parts(site.held(cut), before)
    cut.optim_step(adam(numbers[3])).result()
    same_parts(site.held(cut), expected)
    assert site.held(cut).steps == 4


def test_ids_from_before_give_their_results(again):
    """Of training, that is: samples are requested again."""
    site = again()
    trainer = site.trainer()
    step = {"model_id": trainer.model_id, "adam_params": {"learning_rate": 1e-3}}

    def update(place):
        return site.post("optim_step", step | {"seq_id": place}).json()["request_id"]

    def sample():
        params = {"max_tokens": 3, "seed": 1}
        return asked(site, sampler, 0, sampling_params=params).json()["request_id"]

    ids = [update(place) for place in (1, 2, 4)]
    results = [site.retrieve(id).json() for id in ids[:2]]
    sampler = sampler_of(site)
    first = sample()
    drawn_before = site.retrieve(first).json()["sequences"]
    site = again(site)
    assert [site.retrieve(id).json() for id in ids[:2]] == results
    assert update(2) == ids[1]
    update(3)
    assert site.retrieve(ids[2]).json()["metrics"]["skipped"] == 0
    assert site.held(trainer).steps == 4
    assert site.retrieve(first).status_code == 410
    assert site.retrieve(sample()).json()["sequences"] == drawn_before
