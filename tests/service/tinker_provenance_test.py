"""Provenance by the official SDK: data that name sequences sampled here replay the experts that
these visited (R3).
"""

import dataclasses

import numpy as np
import pytest
from tinker import types

from mint_jax.service import keys as keys_
from tests.service.sites import sites as sites
from tests.service.tinker_sampling_test import ints, params
from tests.train.live_test import random_state

pytestmark = pytest.mark.long  # programs of a base with experts and latents


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """Keys of two tenants, and their folder."""
    folder = tmp_path_factory.mktemp("keys")
    return {tenant: keys_.add(folder, tenant, keys_.SCOPES)[1] for tenant in ("ann", "bob")}, folder


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe"])
def site(request, sites, tiny_base, secrets):
    return sites(tiny_base(request.param), keys=keys_.Keys(secrets[1]))


def rollout(trainer, prompt):
    """A conversation of two samples, the second of which reads the first: its datum without
    provenance and with it, and the second's id.
    """
    sampler = trainer.save_weights_and_get_sampling_client()
    first = sampler.sample(ints(prompt), 1, params(max_tokens=5)).result().sequences[0]
    longer = ints([*prompt, *first.tokens])
    second = sampler.sample(longer, 1, params(max_tokens=4, seed=2)).result().sequences[0]
    whole = [*prompt, *first.tokens, *second.tokens]
    spans = [
        types.PromptProvenanceSpan(sequence_id=second.sequence_id, length=len(prompt) + 5),
        types.SampledProvenanceSpan(sequence_id=second.sequence_id, length=3),
    ]
    rows = [
        dataclasses.replace(spans[0], offset=1, length=len(prompt) + 4),
        dataclasses.replace(spans[1], length=4),
    ]
    n, m = len(whole) - 1, len(prompt) - 1
    advantages = np.array([0.0] * m + [1.0] * (n - m), np.float32)
    inputs = {"target_tokens": whole[1:]}
    inputs["logprobs"] = [0.0] * m + first.logprobs + second.logprobs
    datum = types.Datum(ints(whole[:-1]), inputs | {"advantages": advantages})
    named = datum.with_provenance(model_input=spans, loss_fn_inputs=rows)
    return datum, named, second.sequence_id


def test_routes_are_those_of_the_sample_and_nobody_else_s(site, secrets, rng, monkeypatch):
    """``train/replay_test.py`` shows what they change."""
    journaled, submit = [], site.server.durable.submit

    def record(model, place, call):
        journaled.append(call)
        return submit(model, place, call)

    monkeypatch.setattr(site.server.durable, "submit", record)
    ann, bob = (site.client(secret) for secret in secrets[0].values())
    trainer, stranger = site.trainer(client=ann), site.trainer(client=bob)
    site.put(trainer, random_state(rng, site.server.base, site.held(trainer).config))
    plain, named, id = rollout(trainer, rng.integers(3, 97, 6).tolist())
    completion = site.server.sequences.find(id, "ann")
    assert completion is not None
    assert site.server.sequences.find(id, "bob") is None
    for one, datum in ((trainer, plain), (trainer, named), (stranger, named)):
        one.forward_backward([datum], "importance_sampling").result()
    without, found, foreign = (call.data[0].routes for call in journaled[-3:])
    assert without is None
    assert foreign is None
    expected = np.concatenate([completion.prompt_routes, completion.routes])
    assert found.shape == expected.shape
    assert found.shape[0] == plain.model_input.length
    np.testing.assert_array_equal(found, expected)
    assert (found >= 0).all()
