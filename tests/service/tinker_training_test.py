"""Training by the official SDK: equal to torch, in order, once, whatever else is asked of the
server.
"""

import dataclasses

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests import oracles
from tests.service.custom_loss_test import LOSSES as TRACED
from tests.service.custom_loss_test import clipped
from tests.service.sites import adam, datum_of, logprobs_of
from tests.service.sites import site as site
from tests.service.sites import sites as sites
from tests.train import live_test
from tests.train.live_test import (
    LOSSES,
    Tenant,
    away_from_edges,
    random_data,
    random_optimizer,
    random_state,
)

CLIPPED = {"ppo", "cispo", "gspo"}


def spanned(datum, id, sampled):
    """A datum with provenance: targets of one sequence where they were sampled."""
    kinds = types.PromptProvenanceSpan, types.SampledProvenanceSpan
    offsets = np.cumsum(sampled) - sampled
    spans = [
        kinds[int(is_sampled)](sequence_id=id, offset=int(at * is_sampled), length=1)
        for is_sampled, at in zip(sampled, offsets)
    ]
    return datum.with_provenance(model_input=spans, loss_fn_inputs=spans)


def sent(data, kind):
    """Our data as a client of Tinker states them: what counts not has no advantage, but for DRO,
    whose square needs weights.
    """
    out = []
    for datum in data:
        inputs = dict(datum_of(datum).loss_fn_inputs)
        if kind not in ("cross_entropy", "soft", "dro"):
            del inputs["weights"]
            inputs["advantages"] = types.TensorData.from_numpy(datum.advantages * datum.weights)
        if kind == "gspo":
            inputs["sequence_ratio_mask"] = types.TensorData.from_numpy(datum.weights)
        out.append(types.Datum(types.ModelInput.from_ints(datum.tokens.tolist()), inputs))
        if kind == "stable_reinforce":
            out[-1] = spanned(out[-1], "x", datum.weights != 0)
    return out


def options(kind):
    low, high, beta = LOSSES.get(kind, (0, 0, 0))
    if kind in ("dro", "stable_reinforce"):
        return {"beta" if kind == "dro" else "kl_coeff": beta}
    clips = {"clip_low_threshold": low, "clip_high_threshold": high}
    return clips if kind in CLIPPED else None


def data_for(rng, tenant, kind):
    data = random_data(rng, kind, 24)
    while kind in CLIPPED and not away_from_edges(tenant, data, kind):
        data = random_data(rng, kind, 24)
    return data


def same_parts(one, two):
    assert one.parts.keys() == two.parts.keys()
    for part, leaves in one.parts.items():
        for path, leaf in leaves.items():
            np.testing.assert_array_equal(leaf, two.parts[part][path], err_msg=f"{part} {path}")


def test_every_loss_and_update_is_torch_s(rng, site, hf_dirs):
    """Rounds of one loss each, sent without waiting; updates have numbers of their own."""
    trainer = site.trainer()
    state = random_state(rng, site.server.base, site.held(trainer).config)
    site.put(trainer, state)
    tenant = Tenant(oracles.torch_model(hf_dirs("llama"), torch.float64), state)
    noted = []
    for kind in [*LOSSES, "soft"]:
        data = data_for(rng, tenant, kind)
        name = "cross_entropy" if kind == "soft" else kind
        loss, logprobs = tenant.forward_backward(data, name)
        numbers = random_optimizer(rng)
        norm = tenant.optim(numbers)
        asked = (
            trainer.forward_backward(sent(data, kind), name, options(kind)),
            trainer.optim_step(adam(numbers)),
        )
        after = trainer.forward(sent(data, kind), name, options(kind))
        told, updated = (one.result() for one in asked)
        # float32 through three layers and up to seven updates, at log-probabilities of about 5; a
        # loss sums up to 120 of them
        for got, want in zip(logprobs_of(told), logprobs, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-3)
        assert told.metrics["loss:sum"] == pytest.approx(loss, rel=1e-3, abs=2e-2)
        if name == "cross_entropy":
            for one, got, datum in zip(told.loss_fn_outputs, logprobs_of(told), data):
                np.testing.assert_allclose(
                    one["elementwise_loss"].to_numpy(), -datum.weights * got, rtol=1e-5, atol=1e-6
                )
        assert updated.metrics is not None
        assert updated.metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
        noted.append(updated.metrics["grad_norm"])
        for got, datum in zip(logprobs_of(after.result()), data, strict=True):
            np.testing.assert_allclose(got, tenant.logprobs(datum).detach().numpy(), atol=2e-3)
    held = site.held(trainer)
    assert held.steps == len(LOSSES) + 1
    charted = [point for _, point in site.server.curves.of(trainer.model_id)]
    assert [point.grad_norm for point in charted] == pytest.approx(noted)
    assert all(point.loss is not None for point in charted)
    for path, factor in tenant.factors.items():
        moved = np.abs(factor.detach().numpy() - state.parts["factors"][path]).max()
        np.testing.assert_allclose(held.parts["factors"][path], factor.detach(), atol=2e-2 * moved)


@pytest.mark.long  # compiles the programs of sampling
def test_stable_reinforce_reads_what_recorded_samples_drew(rng, site):
    trainer, prompt = site.trainer(), rng.integers(3, 97, 5).tolist()
    state = random_state(rng, site.server.base, site.held(trainer).config)
    site.put(trainer, state)
    rows = []
    for recorded in (True, False):
        sampler = trainer.save_weights_and_get_sampling_client(
            record_stability_info=recorded
        ).result()
        how = types.SamplingParams(max_tokens=6, stop=[])
        [drawn] = sampler.sample(types.ModelInput.from_ints(prompt), 1, how).result().sequences
        tokens = prompt + drawn.tokens
        sampled = np.arange(1, len(tokens)) >= len(prompt)
        inputs = {"target_tokens": tokens[1:], "advantages": sampled * rng.normal()}
        datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
        logprobs = np.zeros(sampled.size, np.float32)
        logprobs[sampled] = drawn.logprobs
        full = types.Datum(datum.model_input, inputs | {"logprobs": logprobs})
        rows.append([spanned(one, drawn.sequence_id, sampled) for one in (datum, full)])
    # one update away from the sampler, so that its log-probabilities matter
    site.put(trainer, random_state(rng, site.server.base, state.config))
    gradients = []
    for datum in rows[0]:
        trainer.forward_backward([datum], "stable_reinforce", {"kl_coeff": 0.7}).result()
        gradients.append(site.held(trainer).parts["grad"])
        trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
    for path, leaf in gradients[0].items():
        np.testing.assert_array_equal(leaf, gradients[1][path])
    with pytest.raises(tinker.RequestFailedError, match="record_stability_info"):
        trainer.forward_backward([rows[1][0]], "stable_reinforce").result()
    trainer.forward_backward([rows[1][1]], "stable_reinforce").result()


def test_a_traced_loss_is_computed_here_as_by_the_sdk_in_the_client(rng, site):
    client = site.client()
    here, there = site.trainer(client=client), site.trainer(client=client)
    state = random_state(rng, site.server.base, site.held(here).config)
    site.put(here, state)
    site.put(there, state)
    handle = client.create_custom_loss(clipped, TRACED[clipped]).result()
    assert handle.loss_id is not None
    data = []
    for datum in random_data(rng, "ppo", 12):
        inputs = {"old": datum.old_logp, "advantages": datum.advantages, "mask": datum.weights}
        inputs |= {"target_tokens": np.int64(datum.targets), "beta": np.array(0.3, np.float32)}
        data.append(types.Datum(types.ModelInput.from_ints(datum.tokens.tolist()), inputs))
    one = here.forward_backward_custom(data, handle)
    updated = here.optim_step(types.AdamParams(learning_rate=0.0))  # waits for both passes
    one = one.result()
    assert updated.result().metrics["grad_norm"] > 0
    here.forward_backward_custom(data, handle).result()
    # the SDK differentiates this one; the update follows both of its passes
    two = there.forward_backward_custom(data, dataclasses.replace(handle, loss_id=None)).result()
    assert two.metrics.pop("surrogate_loss:sum") is not None
    assert one.metrics == pytest.approx(two.metrics, rel=1e-4, abs=1e-5)
    for got, want in zip(logprobs_of(one), logprobs_of(two), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    live_test.assert_close(site.held(here).parts["grad"], site.held(there).parts["grad"])
    before = site.held(here).parts["grad"]
    only = here.forward(data, "custom", {"loss_id": handle.loss_id}).result()
    assert only.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-5)
    live_test.assert_close(site.held(here).parts["grad"], before)
    wrong = [datum_of(random_data(rng, "ppo")[0])]
    with pytest.raises(tinker.RequestFailedError, match="datum 0: loss_fn_inputs has no old"):
        here.forward_backward(wrong, "custom", {"loss_id": handle.loss_id}).result()


def test_a_seed_and_families_make_the_adapter(site):
    client = site.client()
    one, same, other = (site.held(site.trainer(client=client, seed=seed)) for seed in (7, 7, 8))
    same_parts(one, same)
    assert any(
        (a != b).any()
        for a, b in zip(one.parts["factors"].values(), other.parts["factors"].values())
    )
    only = site.trainer(client=client, train_mlp=False, train_unembed=False)
    assert set(site.held(only).config.targets) == {"q", "k", "v", "o"}
    info = only.get_info()
    found = info.model_data.model_name, info.model_id, info.is_lora
    assert found == (site.server.name, only.model_id, True)


def test_a_session_that_is_over_takes_nothing(site):
    client = site.client()
    trainer = site.trainer(client=client)
    session = trainer.model_id.split(":")[0]
    client.close("success").result()
    assert site.post("session_heartbeat", {"session_id": session}).status_code == 410
    step = {"model_id": trainer.model_id, "seq_id": 1, "adam_params": {}}
    answer = site.post("optim_step", step)
    assert answer.status_code == 404
    assert "has ended with its session" in answer.json()["detail"]
    assert trainer.model_id not in site.server.live
