"""The whole application with keys: rules of routes, and tenants that see their own objects."""

import gc
import itertools

import httpx
import openai
import pytest
import tinker
from starlette.routing import Route
from tinker import types

from mint_jax.models import base as base_lib
from mint_jax.service import keys as keys_lib
from mint_jax.service.endpoints import TABLE
from mint_jax.service.keys import Keys
from tests.service.sites import sites  # noqa: F401 (a fixture)

GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def secrets(folder):
    """One key of each of two tenants, and an operator's."""
    scopes = {"ann": ("read", "sample", "train"), "bob": ("read", "sample", "train")}
    scopes["root"] = ("admin",)
    return {tenant: keys_lib.add(folder, tenant, mine)[1] for tenant, mine in scopes.items()}


@pytest.fixture(scope="module")
def guarded(sites, mesh, folder, secrets):  # noqa: F811
    # this clock makes the server read the keys' file with every request
    keys = Keys(folder, monotonic=itertools.count(0, 2).__next__)
    return sites(base_lib.load("tiny-random", mesh), keys=keys)


def get(site, path, key=None):
    return httpx.get(site.url + path, headers={} if key is None else {"x-api-key": key})


def test_every_route_has_an_endpoint_and_is_documented(guarded):
    there, app = set(), guarded._web.config.app
    while not hasattr(app, "routes"):  # behind its gate and its monitor
        inner = (cell.cell_contents for cell in getattr(app, "__closure__", ()))
        app = next((one for one in inner if hasattr(one, "app")), app).app
    for route in app.routes:
        assert isinstance(route, Route)
        path = route.path.replace("{name:path}", "a").replace("{", "").replace("}", "")
        for method in route.methods or ():
            assert TABLE.find(method, path) is not None, f"{method} {route.path} would take any key"
            there.add((method, route.path.replace(":path}", "}")))
    document = get(guarded, "/openapi.json").json()["paths"]
    documented = {(m.upper(), path) for path, methods in document.items() for m in methods}
    public = {one for one in there if one[0] != "HEAD" and not one[1].startswith("/console")}
    assert {one for one in documented if one[0] != "PARAMETERS"} == public


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/v1/asample"])
def test_a_refused_request_is_freed(guarded, secrets, path):
    """An exception keeps the variables of its frames; in a cycle with a task, until the garbage
    collector runs.
    """
    body = {"model": "none", "prompt": [[0.5]] * 5000, "messages": "x" * 50_000, "seq_id": 1}
    body["sampling_session_id"] = "none"
    headers = {"x-api-key": secrets["ann"]}

    def refused():
        return httpx.post(guarded.url + path, json=body, headers=headers).status_code in (400, 404)

    assert refused()
    gc.collect()
    gc.disable()
    before = len(gc.get_objects())
    try:
        assert all(refused() for _ in range(8))
        assert len(gc.get_objects()) - before < 5000, "one body has 5,000 lists"
    finally:
        gc.enable()


def test_a_key_is_exchanged_for_a_token_that_ends_with_it(guarded, folder):
    key, secret = keys_lib.add(folder, "eve", ("read",))
    secret = "sk-" + secret[-43:]
    assert guarded.post("auth/token", {}).status_code == 401
    token = guarded.post("auth/token", {}, secret).json()["jwt"]
    assert get(guarded, "/api/v1/training_runs", token).json()["training_runs"] == []
    assert guarded.post("optim_step", {}, token).status_code == 403
    assert guarded.post("auth/token", {}, token).status_code == 403
    assert get(guarded, "/api/v1/training_runs", token[:-2] + "AA").status_code == 401
    keys_lib.revoke(folder, key.id)
    assert get(guarded, "/api/v1/training_runs", token).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("POST", "/v1/embeddings", 404, None),
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("OPTIONS", "/api/v1/training_runs/a/checkpoints/b/c/publish", 405, "DELETE, POST"),
    ],
)
def test_unknown_paths_and_methods(guarded, secrets, method, path, status, allowed):
    headers = {"x-api-key": secrets["ann"]}
    answer = httpx.request(method, guarded.url + path, headers=headers)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allowed)
    if path.startswith("/v1"):
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_server_that_has_failed_answers_503(sites, mesh):  # noqa: F811
    site = sites(base_lib.load("tiny-random", mesh))
    site.server.durable.failed = OSError("no space left")
    assert get(site, "/ready").status_code == 503
    assert "no space left" in get(site, "/ready").text
    chunks = [{"type": "encoded_text", "tokens": [1]}]
    body = {"base_model": "tiny-random", "num_samples": 1, "prompt": {"chunks": chunks}}
    assert site.post("asample", body | {"sampling_params": {}}).status_code == 503
    assert get(site, "/health").status_code == 200


def test_tenants_see_only_their_own_objects(guarded, secrets):
    ann, bob = (guarded.client(secrets[who]) for who in ("ann", "bob"))
    trained = ann.create_lora_training_client("tiny-random", 8).result()
    tokens = types.ModelInput.from_ints([5, 6, 7])
    inputs = {"target_tokens": [6, 7, 8], "weights": [1.0] * 3}
    data = [types.Datum(model_input=tokens, loss_fn_inputs=inputs)]
    trained.forward_backward(data, "cross_entropy").result()
    trained.optim_step(types.AdamParams(learning_rate=0.01)).result()
    path = trained.save_weights_for_sampler("one").result().path
    sampler = ann.create_sampling_client(path).result()
    sampled = sampler.sample(tokens, 1, GREEDY).result().sequences[0].tokens
    with pytest.raises(tinker.NotFoundError):
        bob.create_sampling_client(path).result().sample(tokens, 1, GREEDY).result()
    assert get(guarded, "/api/v1/training_runs", secrets["bob"]).json()["training_runs"] == []
    hers, his = (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=secrets[who], max_retries=0)
        for who in ("ann", "bob")
    )
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0}
    answer = hers.completions.create(model=path, extra_body={"return_token_ids": True}, **asked)
    assert answer.choices[0].token_ids == sampled
    digest = answer.mint_revision
    for name in (path, digest, f"{trained.model_id}", f"ann/{trained.model_id}"):
        with pytest.raises(openai.NotFoundError):
            his.completions.create(model=name, prompt=[5], max_tokens=1)
    listed = {model.id.split("@")[0].split("/")[-1] for model in hers.models.list()}
    assert trained.model_id in listed
    assert {model.id for model in his.models.list()} == {"tiny-random"}

    external = trained.save_weights_external("files").result().path
    urls = ann.create_rest_client().get_external_weights_urls(external).result().urls
    assert [httpx.get(url).status_code for url in urls.values()] == [200, 200], "without a key"
    assert get(guarded, "/api/v1/files/forged").status_code == 400
