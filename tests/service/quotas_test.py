"""Quotas: load is refused for now, owned objects for good, and what fits is not refused."""

import json
import logging
import threading

import httpx
import pytest
import tinker
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from tinker import types

from mint_jax.errors import UserError
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.keys import CHECK_S
from mint_jax.service.quotas import FILE, Busy, Quota, Quotas
from tests.service.conftest import until
from tests.service.gate_test import ask
from tests.service.sites import datum_of
from tests.service.sites import site as site
from tests.service.sites import sites as sites
from tests.train.live_test import random_data


def test_the_file_says_what_differs_from_the_default_and_is_read_again(tmp_path, caplog):
    now = [0.0]

    def write(text):
        (tmp_path / FILE).write_text(text)
        now[0] += CHECK_S

    quotas = Quotas(Quota(tokens=100, policies=3), tmp_path, lambda: now[0])
    assert quotas.of("ann") == Quota(tokens=100, policies=3)
    write(json.dumps({"ann": {"tokens": 7, "policies": None}}))
    assert quotas.of("ann") == Quota(tokens=7, policies=3)
    assert quotas.of("bob") == Quota(tokens=100, policies=3)
    for text in ("[", "[]", '{"ann": 7}', '{"ann": {"tokens": -1}}', '{"ann": {"token": 1}}'):
        caplog.clear()
        write(text)
        with caplog.at_level(logging.ERROR):
            assert quotas.of("ann") == Quota(tokens=7, policies=3)
        assert "the earlier ones stay" in caplog.text
        with pytest.raises(UserError, match="quota"):
            Quotas(folder=tmp_path)
    (tmp_path / FILE).unlink()
    now[0] += CHECK_S
    assert quotas.of("ann") == quotas.default


def test_a_request_that_others_wait_for_is_let_in():
    """Numbers 2 and 3 of a model came first and hold all tokens: they end only behind number 1."""
    quotas = Quotas(Quota(tokens=10))
    for number in (2, 3):
        assert quotas.begin(("m", number), "a", 5)
    for other in (("m", 4), ("other", 1), "a sample"):
        with pytest.raises(Busy, match="has 10 tokens in flight and asks for 5 more, of 10"):
            quotas.begin(other, "a", 5)
    assert quotas.begin(("m", 1), "a", 5)
    with pytest.raises(Busy):  # one of a model, no more
        quotas.begin(("m", 2.5), "a", 5)
    quotas.end_request("m", None)
    assert not quotas.tokens


def test_requests_in_flight_are_a_tenants_own_number():
    async def answer(request):
        return Response("ok")

    named = Quotas(Quota(requests=0))
    app = Gate(Starlette(routes=[Route("/x", answer)]), None, Limits(), quotas=named)
    refused = ask(app, "GET", "/x")
    named.default = Quota(requests=1)
    served = ask(app, "GET", "/x")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert served.status_code == 200
    assert "tenant default has 0 requests in flight" in refused.json()["detail"]


@pytest.fixture
def limited(site):
    """``limited(policies=1)`` changes the quotas of a site; they are lifted again."""
    yield lambda **limits: setattr(site.server.quotas, "default", Quota(**limits))
    site.server.quotas.default = Quota()


def batch(rng):
    return [datum_of(one) for one in random_data(rng, "cross_entropy", 12)]


def fails(future, message):
    with pytest.raises(tinker.RequestFailedError, match=message) as told:
        future.result()
    assert told.value.category == types.RequestErrorCategory.User


def test_policies_are_limited_until_one_is_unloaded(site, limited):
    client = site.client()
    for model in site.server.book.living("default"):
        site.post("unload_model", {"model_id": model.id})
    limited(policies=2)
    first, _ = site.trainer(client=client), site.trainer(client=client)
    with pytest.raises(
        tinker.PermissionDeniedError, match="has 2 policies in training, of 2: unload one"
    ):
        site.trainer(client=client)
    session, number = first.model_id.split(":train:")
    again = {"session_id": session, "model_seq_id": int(number), "base_model": site.server.name}
    answer = site.post("create_model", again | {"lora_config": {"rank": 8}})
    assert answer.status_code != 403, "it is there already"
    assert site.post("unload_model", {"model_id": first.model_id}).status_code == 200
    assert site.trainer(client=client).model_id


def test_bytes_of_states_and_checkpoints(rng, site, limited):
    client, book = site.client(), site.server.book
    trainer = site.trainer(client=client)
    trainer.forward_backward(batch(rng), "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    size = site.held(trainer).without_gradients().nbytes
    assert book.model("default", trainer.model_id).details["nbytes"] == size
    living = sum(one.details.get("nbytes", 0) for one in book.living("default"))
    limit = book.checkpoint_totals("default")[1] + living + size + size // 2
    limited(bytes=limit)
    path = trainer.save_state("one").result().path
    message = f"bytes of checkpoints and training states and asks for {size} more, of {limit}"
    fails(trainer.save_state("two"), message)
    trainer.save_state("one", overwrite=True).result()  # in the place of the first
    trainer.save_weights_for_sampler("small").result()
    with pytest.raises(tinker.PermissionDeniedError, match="delete checkpoints, or unload"):
        site.trainer(client=client)
    run = f"{site.url}/api/v1/training_runs/{trainer.model_id}"
    assert httpx.delete(f"{run}/checkpoints/{path.split('/', 3)[3]}").is_success
    trainer.save_state("two").result()


@pytest.mark.long
def test_tokens_in_flight_make_a_client_wait_and_too_many_fail(rng, site, limited, monkeypatch):
    trainer, data = site.trainer(), []
    while (tokens := sum(datum.model_input.length for datum in data)) < 8:
        data += batch(rng)
    limited(tokens=tokens)
    busy, begin = [], site.server.quotas.begin

    def counted(*request):
        try:
            return begin(*request)
        except Busy:
            busy.append(request)
            raise

    monkeypatch.setattr(site.server.quotas, "begin", counted)
    sampler = site.client().create_sampling_client(base_model=site.server.name).result()
    prompt = types.ModelInput.from_ints(rng.integers(3, 97, 4).tolist())

    def sample(count):
        return sampler.sample(prompt, 1, types.SamplingParams(max_tokens=count))

    fails(sample(tokens), f"may have {tokens} in flight: ask for fewer at once")
    twice = trainer.forward_backward([*data, *data], "cross_entropy")
    fails(twice, f"the request has {2 * tokens} tokens")
    released = threading.Event()
    site.server.durable.do("", lambda live: released.wait(60))
    try:
        asked = [trainer.forward_backward(data, "cross_entropy")]
        until(lambda: site.server.quotas.tokens)
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}}
        body |= {"base_model": site.server.name, "sampling_params": {"max_tokens": 4}}
        refused = site.post("asample", body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        asked += [sample(4), trainer.forward_backward(data, "cross_entropy")]
        until(lambda: len(busy) >= 3)
    finally:
        released.set()
    for one in asked:  # the SDK has asked again
        one.result()
    # a request ends after its answer
    until(lambda: httpx.get(site.url + "/debug/state").json()["tokens_in_flight"] == {})
