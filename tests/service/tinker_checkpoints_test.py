"""Checkpoints by the official SDK: what they continue, who may have them, how long they live, how
they are listed.
"""

import json
import time
import urllib.error
import urllib.request

import numpy as np
import peft
import pyrage
import pytest
import tinker
import torch
from tinker import types

from mint_jax.service import keys as keys_
from mint_jax.service.checkpoints import SNAPSHOTS_S
from mint_jax.service.keys import SCOPES
from tests import oracles
from tests.service.sites import adam, datum_of, logprobs_of
from tests.service.sites import site as site
from tests.service.sites import sites as sites
from tests.service.tinker_training_test import same_parts
from tests.train.live_test import random_data, random_optimizer


def batch(rng):
    return [datum_of(datum) for datum in random_data(rng, "cross_entropy", 12)]


def train(trainer, batches, numbers):
    for data, one in zip(batches, numbers, strict=True):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(adam(one)).result()


def user_error(future, message):
    with pytest.raises(tinker.RequestFailedError, match=message) as failed:
        future.result()
    assert failed.value.category == types.RequestErrorCategory.User


@pytest.mark.parametrize("how", ["created", "loaded"])
@pytest.mark.parametrize("optimizer", [True, False])
def test_what_was_saved_goes_on_bit_for_bit(how, optimizer, rng, site):
    """Pending gradients are no part of a checkpoint; without its optimizer the moments begin
    anew.
    """
    client = site.client()
    trainer = site.trainer(client=client)
    batches, numbers = [batch(rng)[:1] for _ in range(2)], [random_optimizer(rng) for _ in range(2)]
    train(trainer, batches, numbers)
    trainer.forward_backward(batches[0], "cross_entropy").result()
    saved = site.held(trainer)
    path = trainer.save_state("middle").result().path
    assert path == f"tinker://{trainer.model_id}/weights/middle"
    if how == "created":
        make = "create_training_client_from_state" + "_with_optimizer" * optimizer
        again = getattr(client, make)(path).result()
    else:
        again = site.trainer(client=client)
        load = again.load_state_with_optimizer if optimizer else again.load_state
        assert load(path).result().path == path
    assert again.model_id != trainer.model_id
    loaded = site.held(again)
    assert loaded.parts.keys() == ({"factors", "mu", "nu"} if optimizer else {"factors"})
    for part, leaves in loaded.parts.items():
        for name, leaf in leaves.items():
            np.testing.assert_array_equal(leaf, saved.parts[part][name])
    assert loaded.steps == (2 if optimizer else 0)


@pytest.mark.long  # compiles its own program
def test_a_model_keeps_its_optimizer(rng, site):
    client, data = site.client(), batch(rng)[:1]
    trainer = site.trainer(client=client, optimizer=types.DimuonOptimizerConfig())
    how = types.DimuonParams(learning_rate=1e-2, grad_clip_norm=-1.0)

    def update(one):
        one.forward_backward(data, "cross_entropy")
        return one.optim_step(how).result().metrics

    before = site.held(trainer).parts["factors"]
    # relative to rank 32, in float32
    assert update(trainer)["learning_rate"] == pytest.approx(1e-2 * (8 / 32) ** 0.175, rel=1e-6)
    path = trainer.save_state("dimuon").result().path
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert again.get_info().optimizer_config.type == "dimuon"
    update(trainer), update(again)
    held, other = site.held(trainer), site.held(again)
    for name, leaf in held.parts["factors"].items():
        np.testing.assert_array_equal(leaf, other.parts["factors"][name])
        assert (leaf != before[name]).any()
    assert not any(leaf.any() for leaf in held.parts["nu"].values())
    user_error(trainer.optim_step(types.AdamParams()), "optimizer dimuon, .* of adamw")
    plain = client.create_training_client_from_state(path).result()
    assert plain.get_info().optimizer_config.type == "adamw"
    user_error(plain.optim_step(how), "optimizer adamw, .* of dimuon")
    user_error(plain.load_state_with_optimizer(path), "state of dimuon")
    assert plain.load_state(path).result().path == path


def test_a_checkpoint_ends_with_its_time(site, monkeypatch):
    trainer, rest = site.trainer(), site.client().create_rest_client()
    path = trainer.save_state("short", ttl_seconds=3600).result().path
    other = trainer.save_state("long").result().path
    user_error(trainer.save_state("x", ttl_seconds=60), "ttl_seconds is 60; expected .* 3600")

    def paths():
        return {
            one.tinker_path for one in rest.list_checkpoints(trainer.model_id).result().checkpoints
        }

    assert paths() == {path, other}
    now = time.time()
    monkeypatch.setattr(site.server.book, "clock", lambda: now + 3700)
    assert paths() == {other}
    user_error(trainer.load_state(path), "there is no checkpoint")
    site.server.maintain()
    assert site.server.book.remove_expired(SNAPSHOTS_S) == 0
    assert trainer.load_state(other).result().path == other
    rest.set_checkpoint_ttl_from_tinker_path(other, 4000).result()
    monkeypatch.setattr(site.server.book, "clock", lambda: now + 8000)
    assert paths() == set()
    user_error(trainer.load_state(other), "there is no checkpoint")


def test_runs_sessions_and_checkpoints_are_listed_by_pages(site):
    client = tinker.ServiceClient(base_url=site.url, api_key="tml-x", user_metadata={"who": "me"})
    rest = client.create_rest_client()
    trainers = [site.trainer(rank, client, user_metadata={"rank": str(rank)}) for rank in (2, 3, 5)]
    ids = [trainer.model_id for trainer in trainers]
    for trainer in trainers:
        trainer.save_state("s", user_metadata={"note": "n"}).result()
        trainer.save_weights_for_sampler("w").result()
    pages = [rest.list_training_runs(limit=2, offset=offset).result() for offset in (0, 2)]
    runs = [run for page in pages for run in page.training_runs][:3]
    assert [run.training_run_id for run in runs] == ids[::-1]
    assert [run.lora_rank for run in runs] == [5, 3, 2]
    assert runs[0].user_metadata == {"rank": "5"}
    assert runs[0].last_checkpoint.tinker_path.endswith("/weights/s")
    assert runs[0].last_sampler_checkpoint.tinker_path.endswith("/sampler_weights/w")
    path = f"tinker://{ids[0]}/weights/s"
    assert rest.get_training_run_by_tinker_path(path).result().training_run_id == ids[0]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (site.server.name, 2, True)
    state, weights = rest.list_checkpoints(ids[0]).result().checkpoints[::-1]
    assert (state.checkpoint_id, state.checkpoint_type) == ("weights/s", "training")
    assert (weights.checkpoint_id, weights.checkpoint_type) == ("sampler_weights/w", "sampler")
    assert (state.user_metadata, state.size_bytes > 0) == ({"note": "n"}, True)
    lists = [rest.list_user_checkpoints(limit=4, offset=offset).result() for offset in (0, 4)]
    paths = {one.tinker_path for page in lists for one in page.checkpoints}
    assert paths >= {f"tinker://{id}/{k}" for id in ids for k in ("weights/s", "sampler_weights/w")}
    session = ids[0].split(":")[0]
    found = rest.get_session(session).result()
    assert (found.training_run_ids, found.user_metadata) == (ids, {"who": "me"})
    assert session in rest.list_sessions(limit=3).result().sessions
    client.close("success").result()


def test_a_copy_is_the_copiers_own(rng, site):
    """Copies share their source's bytes, which the last of them deletes."""
    trainer, client = site.trainer(), site.client()
    train(trainer, [batch(rng)], [random_optimizer(rng)])
    state = trainer.save_state("s").result().path
    weights = trainer.save_weights_for_sampler("w").result().path
    rest = client.create_rest_client()
    copies = [rest.copy_weights(path, "archive").result() for path in (state, weights)]
    rest.delete_checkpoint_from_tinker_path(state).result()
    again = client.create_training_client_from_state_with_optimizer(copies[0]).result()
    same_parts(site.held(again), site.held(trainer))
    files = set(site.server.checkpoints.folder.glob("*.safetensors"))
    rest.delete_checkpoint_from_tinker_path(copies[0]).result()
    assert len(files - set(site.server.checkpoints.folder.glob("*.safetensors"))) == 1
    raw = {"source_path": weights, "destination_project_id": "archive"}
    sent = [
        site.post("copy_weights", raw, **{"x-idempotency-key": key}).json()["tinker_path"]
        for key in "aab"
    ]
    assert sent[0] == sent[1] != sent[2]
    session = weights.split("/")[2].split(":")[0]
    into = {"source_path": weights, "session_id": session, "model_seq_id": 7}
    path = f"tinker://{session}:train:7/sampler_weights/w"
    assert site.post("copy_weights", into).json() == {"tinker_path": path}


def test_a_published_checkpoint_is_everybody_s_to_read(rng, sites, tiny_base, tmp_path):
    """Two tenants, each with a key."""
    secrets = [keys_.add(tmp_path / "keys", tenant, SCOPES)[1] for tenant in ("ann", "bob")]
    site = sites(tiny_base(), keys=keys_.Keys(tmp_path / "keys"))
    ann, bob = (site.client(secret) for secret in secrets)
    trainer = site.trainer(client=ann)
    train(trainer, [batch(rng)], [random_optimizer(rng)])
    path, rest = trainer.save_state("s").result().path, ann.create_rest_client()
    with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
        bob.create_training_client_from_state(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints[0].public
    again = bob.create_training_client_from_state_with_optimizer(path).result()
    same_parts(site.held(again), site.held(trainer))
    with pytest.raises(tinker.NotFoundError):
        bob.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        bob.create_rest_client().get_training_run(trainer.model_id).result()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
        bob.create_training_client_from_state(path).result()


@pytest.mark.parametrize("encrypted", [False, True])
def test_other_engines_take_an_adapter(encrypted, rng, site, hf_dirs, tmp_path):
    """PEFT over the same base gives the logits that training gives; with age keys the files are
    readable to their holder alone.
    """
    trainer = site.trainer()
    train(trainer, [batch(rng) for _ in range(2)], [random_optimizer(rng) for _ in range(2)])
    key = pyrage.x25519.Identity.generate()
    recipients = [str(key.to_public())] if encrypted else None
    saved = trainer.save_weights_external("out", age_encryption_recipients=recipients)
    path = saved.result().path
    assert path == f"tinker://{trainer.model_id}/external_weights/out"
    told = site.client().create_rest_client().get_external_weights_urls(path).result()
    assert 3000 < told.expires.timestamp() - time.time() <= 3600
    with pytest.raises(urllib.error.HTTPError, match="400"):  # a forged link
        urllib.request.urlopen(next(iter(told.urls.values()))[:-6] + "AAAAAA")
    for name, url in told.urls.items():
        data = urllib.request.urlopen(url).read()
        if encrypted:
            name = name.removesuffix(".age")
            data = pyrage.decrypt(data, [key])
        (tmp_path / name).write_bytes(data)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8
    model = peft.PeftModel.from_pretrained(oracles.torch_model(hf_dirs("llama")), str(tmp_path))
    tokens = rng.integers(3, 97, 9)

    def logprobs(model):
        logits = torch.tensor(oracles.torch_logits(model, tokens[None, :-1])[0])
        return torch.log_softmax(logits, -1).numpy()[range(8), tokens[1:]]

    inputs = {"target_tokens": tokens[1:], "weights": np.ones(8, np.float32)}
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1].tolist()), inputs)
    got = logprobs_of(trainer.forward([datum], "cross_entropy").result())[0]
    np.testing.assert_allclose(got, logprobs(model), atol=5e-5)
    assert np.abs(got - logprobs(model.unload())).max() > 1e-3, "else the adapter does nothing"
