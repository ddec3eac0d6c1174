"""The whole application with keys: every route is behind a rule, tenants see their own, and clients
of both kinds work side by side.
"""

import gc
import itertools
import urllib.request

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
    scopes = {
        "ann": ("read", "sample", "train"),
        "bob": ("read", "sample", "train"),
        "root": ("admin",),
    }
    return {tenant: keys_lib.add(folder, tenant, mine)[1] for tenant, mine in scopes.items()}


@pytest.fixture(scope="module")
def guarded(sites, mesh, folder, secrets):  # noqa: F811
    # which looks at its file every time
    keys = Keys(folder, monotonic=itertools.count(0, 2).__next__)
    return sites(base_lib.load("tiny-random", mesh), keys=keys)


def get(site, path, key=None):
    return httpx.get(site.url + path, headers={} if key is None else {"x-api-key": key})


def test_every_route_has_an_endpoint(guarded):
    for route in routed(guarded._web.config.app):
        assert isinstance(route, Route)
        path = route.path.replace("{name:path}", "a").replace("{", "").replace("}", "")
        for method in route.methods or ():
            assert TABLE.find(method, path) is not None, f"{method} {route.path} would take any key"


def test_without_keys_no_route_answers_to_a_foreign_name(sites, mesh):  # noqa: F811
    """DNS rebinding: a page points its own name at this machine, so that the browser takes the
    server for the page's own site.
    """
    site = sites(base_lib.load("tiny-random", mesh))
    app, foreign = site._web.config.app, {"host": "evil.example"}
    there = [(method, route.path) for route in routed(app) for method in sorted(route.methods)]
    assert len(there) > 60
    with httpx.Client(base_url=site.url) as client:
        for method, path in [
            *there,
            ("GET", "/docs"),
            ("GET", "/"),
            ("GET", "/nothing"),
            ("PATCH", "/v1/models"),
        ]:
            answer = client.request(
                method, path.replace("{", "").replace("}", "").replace(":path", ""), headers=foreign
            )
            assert answer.status_code == 403, f"{method} {path}"
        for path in ("/v1/models", "/debug/state", "/metrics", "/health", "/console/policies"):
            assert client.get(path).status_code == 200, path


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/api/v1/asample",
        "/api/v1/forward_backward",
        "/api/v1/get_info",
    ],
)
def test_what_a_refused_request_was_parsed_into_is_freed(guarded, secrets, path):
    """An exception keeps the variables of the functions that it left; in a cycle with a task, until
    the garbage collector comes.
    """
    body = {
        "model": "none",
        "prompt": [[0.5]] * 5000,
        "messages": "x" * 50_000,
        "sampling_session_id": "none",
        "seq_id": 1,
        "model_id": "none",
    }
    headers = {"x-api-key": secrets["ann"]}

    def ask():
        return httpx.post(guarded.url + path, json=body, headers=headers).status_code

    assert ask() in (400, 404)
    gc.collect()
    gc.disable()
    before = len(gc.get_objects())
    try:
        for _ in range(8):
            assert ask() in (400, 404)
        assert len(gc.get_objects()) - before < 5000, "one tree has 5,000 lists"
    finally:
        gc.enable()


def routed(app):
    """The routes of an application behind its gate and what counts."""
    while not hasattr(app, "routes"):
        app = (
            next(
                cell.cell_contents for cell in app.__closure__ if hasattr(cell.cell_contents, "app")
            ).app
            if hasattr(app, "__closure__")
            else app.app
        )
    return app.routes


def test_the_document_has_every_route_and_nothing_else(guarded):
    told = get(guarded, "/openapi.json").json()
    documented = {
        (method.upper(), path)
        for path, methods in told["paths"].items()
        for method in methods.keys() - {"parameters"}
    }
    there = {
        (method, r.path.replace(":path}", "}"))
        for r in routed(guarded._web.config.app)
        for method in r.methods - {"HEAD"}
    }
    assert documented == {
        (method, path) for method, path in there if not path.startswith("/console")
    }, "pages are for people"


def test_a_key_is_exchanged_for_a_token_that_ends_with_it(guarded, folder):
    key, secret = keys_lib.add(folder, "eve", ("read",), prefix="sk-")
    assert guarded.post("auth/token", {}).status_code == 401
    token = guarded.post("auth/token", {}, secret).json()["jwt"]
    assert get(guarded, "/api/v1/training_runs", token).json()["training_runs"] == []
    assert guarded.post("optim_step", {}, token).status_code == 403
    assert guarded.post("auth/token", {}, token).status_code == 403
    assert get(guarded, "/api/v1/training_runs", token[:-2] + "AA").status_code == 401
    keys_lib.revoke(folder, key.id)
    assert get(guarded, "/api/v1/training_runs", token).status_code == 401


def test_paths_that_openais_api_has_and_this_server_has_not_are_told_in_its_form(guarded, secrets):
    for method, path, status in (
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
    ):
        answer = httpx.request(method, guarded.url + path, headers={"x-api-key": secrets["ann"]})
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            status,
            "invalid_request_error",
        )


def test_a_wrong_method_is_told_all_right_ones(guarded, secrets):
    answer = httpx.options(
        f"{guarded.url}/api/v1/training_runs/a/checkpoints/b/c/publish",
        headers={"x-api-key": secrets["ann"]},
    )
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, POST")


def test_a_server_that_has_failed_says_so_and_asks_to_come_back(sites, mesh):  # noqa: F811
    site = sites(base_lib.load("tiny-random", mesh))
    site.server.durable.failed = OSError("no space left")
    assert get(site, "/ready").status_code == 503
    assert "no space left" in get(site, "/ready").text
    told = {
        "base_model": "tiny-random",
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    }
    assert site.post("asample", told | {"sampling_params": {}}).status_code == 503
    assert get(site, "/health").status_code == 200


def test_tenants_have_their_own_and_nothing_of_others(guarded, secrets, tmp_path):
    ann, bob = (guarded.client(secrets[who]) for who in ("ann", "bob"))
    trained = ann.create_lora_training_client("tiny-random", 8).result()
    tokens = types.ModelInput.from_ints([5, 6, 7])
    data = [
        types.Datum(
            model_input=tokens, loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0] * 3}
        )
    ]
    trained.forward_backward(data, "cross_entropy").result()
    trained.optim_step(types.AdamParams(learning_rate=0.01)).result()
    path = trained.save_weights_for_sampler("one").result().path
    sampled = (
        ann.create_sampling_client(path)
        .result()
        .sample(tokens, 1, GREEDY)
        .result()
        .sequences[0]
        .tokens
    )
    with pytest.raises(tinker.NotFoundError):
        bob.create_sampling_client(path).result().sample(tokens, 1, GREEDY).result()
    for told in (trained.model_id, "0" * 32 + ":train:0"):  # there, and not: the same
        answer = guarded.post("get_info", {"model_id": told}, secrets["bob"])
        assert answer.status_code == 404
        assert answer.json() == {"detail": f"there is no model {told!r}"}
    assert get(guarded, "/api/v1/training_runs", secrets["bob"]).json()["training_runs"] == []
    clients = {
        who: openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=secrets[who], max_retries=0)
        for who in ("ann", "bob")
    }
    answer = clients["ann"].completions.create(
        model=path,
        prompt=[5, 6, 7],
        max_tokens=4,
        temperature=0.0,
        extra_body={"return_token_ids": True},
    )
    assert answer.choices[0].token_ids == sampled  # type: ignore[attr-defined]
    digest = answer.mint_revision  # type: ignore[attr-defined]
    for name in (path, digest, f"{trained.model_id}", f"ann/{trained.model_id}"):
        with pytest.raises(openai.NotFoundError):
            clients["bob"].completions.create(model=name, prompt=[5], max_tokens=1)
    assert trained.model_id in {
        model.id.split("@")[0].split("/")[-1] for model in clients["ann"].models.list()
    }
    assert {model.id for model in clients["bob"].models.list()} == {"tiny-random"}

    external = trained.save_weights_external("files").result().path
    urls = ann.create_rest_client().get_external_weights_urls(external).result().urls
    for name, url in urls.items():  # a link needs no key
        urllib.request.urlretrieve(url, tmp_path / name)
    assert {file.name for file in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert get(guarded, "/api/v1/files/forged").status_code == 400


def test_operators_see_the_server_and_tenants_do_not(guarded, secrets):
    for path in ("/metrics", "/debug/state"):
        assert get(guarded, path).status_code == 401
        assert get(guarded, path, secrets["ann"]).status_code == 403
        assert get(guarded, path, secrets["root"]).status_code == 200
    assert get(guarded, "/health").status_code == get(guarded, "/ready").status_code == 200
    assert get(guarded, "/debug/state", secrets["root"]).json()["trouble"] == ""
    text = get(guarded, "/metrics", secrets["root"]).text
    for name in (
        "mint_http_requests_total",
        "mint_engine_decodes_total",
        "mint_training_steps_total",
        "vllm:lora_requests_info",
        "mint_kernels_passed_over",
    ):
        assert name in text
    assert guarded.post("create_session", {"tags": []}, secrets["root"]).status_code == 200
    assert guarded.post("asample", {}, secrets["root"]).status_code == 403
