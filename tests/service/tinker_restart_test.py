"""A server that ends and one that goes on with its folder: clients of the official SDK sample what
was saved. ``http_kill_test.py`` and ``durable_test.py`` show that training goes on.
"""

import pytest

from tests.service.sites import SIZES
from tests.service.sites import sites as sites
from tests.service.tinker_sampling_test import asked, drawn, ints, params, sampler_of
from tests.train.live_test import random_state

pytestmark = pytest.mark.long


def test_what_was_saved_to_be_sampled_is_there_for_good(sites, tiny_base, tmp_path, rng):
    """Named or not, from the disk alone: its policy and its session are over. Clients from before
    go on, others begin; samples from before are gone, and are requested again.
    """
    site = sites(tiny_base(), tmp_path / "server", SIZES)
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
    raw, short = sampler_of(site), {"sampling_params": {"max_tokens": 3, "seed": 1}}
    id = asked(site, raw, 0, **short).json()["request_id"]
    before = site.retrieve(id).json()["sequences"]
    assert site.post(f"sessions/{trainer.model_id.split(':')[0]}/finish", {}).status_code == 200
    site.close()
    site = sites(tiny_base(), tmp_path / "server", SIZES, site.port)
    assert not any(site.server.live.places().values())
    assert site.retrieve(id).status_code == 410
    id = asked(site, raw, 0, **short).json()["request_id"]
    assert site.retrieve(id).json()["sequences"] == before
    later = site.client()
    for answer, sampler, path in zip(expected, samplers, paths):
        for one in (sampler, later.create_sampling_client(model_path=path).result()):
            told = one.sample(prompt, 2, params()).result()
            assert drawn(told) == drawn(answer)
            assert [s.logprobs for s in told.sequences] == [s.logprobs for s in answer.sequences]
