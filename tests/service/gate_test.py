"""The gate: who may ask, how much, and what is said and logged of it."""

import asyncio
import gzip
import json
import logging
from typing import Any

import httpx
import openai
import pytest
import tinker
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from tinker._client import AsyncTinker
from tinker.types.client_config_response import ClientConfigResponse

from mint_jax.errors import UserError
from mint_jax.service import bodies
from mint_jax.service.binding import check_binding
from mint_jax.service.errors import HANDLERS
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.keys import SCOPES, Keys, add


async def echo(request: Request):
    body = await request.body()
    state = request.state
    shown = {"tenant": state.tenant, "scopes": state.scopes, "id": state.request_id}
    return JSONResponse(shown | {"size": len(body), "headers": dict(request.headers)})


def waits(event: asyncio.Event):
    """Returns an endpoint that answers after an event."""

    async def answer(request: Request):
        await request.body()
        await event.wait()
        return PlainTextResponse("done")

    return answer


def gate_of(*routes, keys=None, limits=None):
    methods = ["GET", "POST", "PUT", "DELETE"]
    every = Route("/{path:path}", echo, methods=methods)
    return Gate(Starlette(routes=[*routes, every], exception_handlers=HANDLERS), keys, limits)


def client_of(app, root="") -> Any:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def ask(app, method, path, root="", **more):
    async def one():
        async with client_of(app, root) as client:
            return await client.request(method, path, **more)

    return asyncio.run(one())


@pytest.fixture
def secrets(tmp_path):
    """A key of each scope; of tenant ``of-<scope>``."""
    return {scope: add(tmp_path, f"of-{scope}", [scope])[1] for scope in SCOPES}


@pytest.fixture
def keys(tmp_path, secrets):
    return Keys(tmp_path)


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


# -- who


def test_both_headers_are_read_and_the_app_is_told_who_asks(keys, secrets):
    app = gate_of(keys=keys)
    for headers in (
        {"X-API-Key": secrets["train"]},
        bearer(secrets["train"]),
        {"X-API-Key": secrets["train"], **bearer(secrets["train"])},
    ):
        got = ask(app, "POST", "/api/v1/optim_step", content=b"abc", headers=headers)
        assert got.status_code == 200
        told = got.json()
        assert (told["tenant"], told["scopes"], told["size"]) == ("of-train", ["train"], 3)
        assert told["id"] == got.headers["x-request-id"]
        # the app has no use for them
        assert not {"x-api-key", "authorization"} & set(told["headers"])


TRAIN = "/api/v1/optim_step"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (TRAIN, lambda s: {}),
        (TRAIN, lambda s: {"x-api-key": s["train"][:-1]}),
        (TRAIN, lambda s: {"x-api-key": s["train"], "authorization": "Bearer " + s["admin"]}),
        (TRAIN, lambda s: [("x-api-key", s["train"]), ("x-api-key", s["admin"])]),
        (TRAIN, lambda s: {"authorization": "Basic " + s["train"]}),
        (TRAIN, lambda s: {"x-tenant": "of-train", "cookie": "x-api-key=" + s["train"]}),
        (TRAIN + "?x-api-key={train}&api_key={train}", lambda s: {}),
        ("/v1/chat/completions", lambda s: {}),
        ("/no/such/path", lambda s: {}),
    ],
)
def test_without_one_good_key_in_a_header_nobody_gets_in(keys, secrets, caplog, path, headers):
    caplog.set_level(logging.DEBUG)
    called = []

    async def app(scope, receive, send):
        called.append(scope)

    sent = {"headers": headers(secrets), "content": b"x" * 1000}
    got = ask(Gate(app, keys), "POST", path.format(**secrets), **sent)
    assert got.status_code == 401
    assert got.headers["www-authenticate"] in ("Bearer", 'Bearer error="invalid_token"')
    if path.startswith("/v1/"):
        error = got.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_api_key"
    else:
        assert "API key" in got.json()["detail"] or "Bearer" in got.json()["detail"]
    assert not called
    for secret in secrets.values():
        assert secret[-43:-1] not in got.text + logged(caplog)


def test_without_keys_everybody_is_the_default_tenant_but_no_page_of_another_site():
    app = gate_of()
    told = ask(app, "POST", "/v1/load_lora_adapter", headers={"x-api-key": "tml-anything"}).json()
    assert (told["tenant"], told["scopes"]) == ("default", list(SCOPES))
    for origin in ("http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]"):
        assert ask(app, "POST", "/v1/completions", headers={"origin": origin}).status_code == 200
    for origin in ("https://example.com", "null", "http://localhost.example.com", "", "http://["):
        assert ask(app, "POST", "/v1/completions", headers={"origin": origin}).status_code == 403


OURS = ["LocalHost:8000", "localhost.", "127.8.9.1:80", "[::1]:8000", "[::ffff:127.0.0.1]"]
FOREIGN = ["evil.example:8000", "127.0.0.1.evil.example", ":8000", "[::1", "[::2]", "0.0.0.0"]
FOREIGN += ["2130706433", "127.1", "evil.example@localhost", "localhost/evil.example", ""]
FOREIGN += ["localhost..", "localhost:80:80", "http://localhost", "l\xf6calhost"]
FOREIGN += ["localhost evil.example", "localhost, evil.example", "localhost\x00"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/api/v1/client/config"])
def test_without_keys_only_names_of_this_machine_are_answered(path):
    app, called = gate_of(), []

    async def inner(scope, receive, send):
        called.append(scope["path"])
        await PlainTextResponse("secret")(scope, receive, send)

    app.app = inner
    for host in FOREIGN:
        got = ask(app, "POST", path, headers=[(b"host", host.encode("latin-1"))])
        assert (got.status_code, "Host is" in got.text, "secret" in got.text) == (403, True, False)
    assert not called
    for host in OURS:
        assert ask(app, "GET", path, headers={"host": host}).text == "secret", host


def test_other_interfaces_need_keys_and_encryption(keys):
    for host in ("127.3.2.1", "[::1]", "localhost", "::ffff:127.0.0.1"):
        check_binding(host, None, tls=False)
    for host in ("0.0.0.0", "::", "", "localhost.example.com", "128.0.0.1"):
        with pytest.raises(UserError, match="without keys"):
            check_binding(host, None, tls=True)
        with pytest.raises(UserError, match="in the clear"):
            check_binding(host, keys, tls=False)
        check_binding(host, keys, tls=True)


def test_a_setting_adds_names_and_keys_need_none(keys, secrets):
    app = Gate(
        Starlette(routes=[Route("/v1/models", echo)]),
        None,
        hosts=["Box.example", "192.0.2.7", "2001:db8::7"],
    )
    for host in ("box.example", "BOX.EXAMPLE.:80", "192.0.2.7:1", "[2001:db8::7]:1", "localhost"):
        assert ask(app, "GET", "/v1/models", headers={"host": host}).status_code == 200, host
        headers = {"host": host, "origin": f"https://{host}"}
        assert ask(app, "GET", "/v1/models", headers=headers).status_code == 200, host
    refused = ask(app, "GET", "/v1/models", headers={"host": "other.example"})
    assert refused.status_code == 403
    assert "box.example" in refused.json()["error"]["message"]
    assert ask(app, "GET", "/v1/models", headers={"host": "a.box.example"}).status_code == 403
    for wrong in ("https://box.example", "box.example:80", "*.example", "", "[::1]:80"):
        with pytest.raises(UserError, match="hosts has"):
            Gate(app.app, None, hosts=[wrong])
    guarded = gate_of(keys=keys)  # whoever asks shows a key, which no page of another site has
    headers = {"host": "any.example", "x-api-key": secrets["read"]}
    assert ask(guarded, "GET", "/v1/models", headers=headers).status_code == 200


ERRORS = {401: "AuthenticationError", 403: "PermissionDeniedError", 413: "APIStatusError"}
ERRORS |= {429: "RateLimitError", 500: "InternalServerError"}


@pytest.mark.parametrize(("status", "name"), ERRORS.items())
def test_the_official_clients_name_refusals_as_they_should(tmp_path, keys, secrets, status, name):
    paths = ("/v1/completions", "/api/v1/weights_info") if status == 500 else ()
    limits = Limits(body_bytes=40 if status == 413 else 1000, held_bytes=1000)
    app = gate_of(
        *(Route(path, breaks, methods=["POST"]) for path in paths), keys=keys, limits=limits
    )
    unknown = add(tmp_path / "other", "x", ["read"])[1]
    sample, train = (
        {401: unknown, 403: secrets["admin"]}.get(status, secrets[scope])
        for scope in ("sample", "train")
    )
    app.in_flight.update(dict.fromkeys(("of-sample", "of-train"), 1000 * (status == 429)))
    long = "tinker://a/weights/longer-than-forty-bytes"

    async def run():
        async with client_of(app) as http:
            more = {"max_retries": 0, "http_client": http}
            theirs = openai.AsyncOpenAI(api_key=sample, base_url="http://localhost/v1", **more)
            with pytest.raises(getattr(openai, name)) as raised:
                await theirs.completions.create(model="m", prompt=long)
            assert raised.value.status_code == status
            assert raised.value.request_id
            assert raised.value.type
            more["_client_config"] = ClientConfigResponse(use_pyqwest_transport=False)
            client = AsyncTinker(api_key=train, base_url="http://localhost", **more)
            body = {"tinker_path": long}
            with pytest.raises(getattr(tinker, name)) as raised:
                await client.post("/api/v1/weights_info", cast_to=object, body=body)
            assert raised.value.status_code == status

    asyncio.run(run())


# -- what for


@pytest.mark.parametrize(
    ("method", "path", "scopes"),
    [
        ("POST", "/api/v1/create_model", {"train"}),
        ("POST", "/api/v1/asample", {"sample"}),
        ("POST", "/api/v1/client/config", None),
        ("HEAD", "/api/v1/training_runs/s:train:0", {"read", "train"}),
        ("DELETE", "/api/v1/training_runs/s:train:0/checkpoints/weights/a/publish", {"train"}),
        ("GET", "/v1/models/tinker://s:train:0/sampler_weights/a", {"read", "sample"}),
        ("POST", "/oai/api/v1/chat/completions", {"sample"}),
        ("POST", "/v1/load_lora_adapter", {"admin"}),
        ("GET", "/metrics", {"admin"}),
        ("GET", "/anything", set(SCOPES)),
    ],
)
def test_scopes_by_example(keys, secrets, method, path, scopes):
    app = gate_of(keys=keys)
    got = ask(app, method, path)
    assert got.status_code == (200 if scopes is None else 401)
    for scope, secret in secrets.items():
        got = ask(app, method, path, headers={"x-api-key": secret})
        assert got.status_code == (200 if scopes is None or scope in scopes else 403), scope
        if got.status_code == 403 and method != "HEAD":
            assert all(name in got.text for name in [*scopes, scope])


# -- how much

SMALL = Limits(body_bytes=1000, small_body_bytes=500, open_body_bytes=100, held_bytes=16_000)


async def parts(*sizes):
    for size in sizes:
        yield b"x" * size


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [
        ("POST", "/api/v1/asample", 1000),
        ("POST", "/api/v1/create_session", 500),
        ("GET", "/v1/models", 500),
        ("POST", "/no/such", 500),
        ("POST", "/api/v1/client/config", 100),
    ],
)
def test_bodies_are_bounded_as_declared_and_as_read(method, path, most):
    app = gate_of(limits=SMALL)
    for content in (b"", b"x" * most, parts(most - 50, 0, 50)):
        assert ask(app, method, path, content=content).status_code == 200
    for content in (b"x" * (most + 1), parts(most - 50, 51), parts(10_000)):
        got = ask(app, method, path, content=content)
        assert (got.status_code, str(most) in got.text) == (413, True)
    assert app.budget.used == 0


@pytest.mark.parametrize(
    ("coding", "pack"), [("zstd", zstandard.compress), ("gzip", gzip.compress)]
)
def test_compressed_bodies_come_plain_and_bounded(coding, pack):
    app = gate_of(limits=SMALL)

    def post(body, coding):
        headers = {"content-encoding": coding}
        return ask(app, "POST", "/api/v1/forward_backward", content=body, headers=headers)

    told = post(pack(b"0" * 1000), coding).json()
    assert (told["size"], told["headers"]["content-length"]) == (1000, "1000")
    assert "content-encoding" not in told["headers"]
    assert post(pack(b"0" * 1001), coding).status_code == 413
    assert post(pack(b"0" * 1000)[:-1], coding).status_code == 400
    assert post(b"no", "br").status_code == 415
    assert post(b"no", "Identity").status_code == 200
    assert app.budget.used == 0


def test_what_is_protobuf_is_weighed_so_on_its_path_alone():
    """Where JSON is read whatever the type says, the type must not make it lighter."""
    app, seen = gate_of(), []

    async def looks(scope, receive, send):
        seen.append(app.budget.used)
        await PlainTextResponse("")(scope, receive, send)

    app.app = looks
    body = b"\x1a\x00" * 500
    for path in ("/api/v1/forward_backward", "/api/v1/optim_step", "/v1/completions"):
        ask(app, "POST", path, content=body, headers={"content-type": "application/x-protobuf"})
        ask(app, "POST", path, content=body, headers={"content-type": "application/json"})
    assert seen == [1000 + bodies.protobuf_memory(body), *[1000 + bodies.json_memory(body)] * 5]


def test_requests_in_flight_of_a_tenant_and_of_all_are_bounded(tmp_path):
    secrets = {name: add(tmp_path, name, SCOPES)[1] for name in ("alice", "bob", "carol")}

    async def run():
        go, poll = asyncio.Event(), "/api/v1/retrieve_future"  # polls are not counted
        routes = [Route(path, waits(go), methods=["POST"]) for path in ("/api/v1/asample", poll)]
        app = gate_of(*routes, keys=Keys(tmp_path), limits=Limits(tenant=2, total=3))
        async with client_of(app) as client:

            def post(name, path="/api/v1/asample"):
                return client.post(path, headers=bearer(secrets[name]))

            waiting = [asyncio.create_task(post("alice", poll)) for _ in range(5)]
            running = [asyncio.create_task(post(name)) for name in ("alice", "alice", "bob")]
            while app.in_flight.total() < 3:
                await asyncio.sleep(0)
            for name, message in (("alice", "tenant alice has 2"), ("carol", "the server has 3")):
                refused = await post(name)
                assert refused.status_code == 429
                assert message in refused.json()["detail"]
                assert refused.headers["retry-after"] == "1"
            assert (await client.get("/health")).status_code == 200
            go.set()
            assert [(await task).status_code for task in running + waiting] == [200] * 8
            assert (await post("alice")).status_code == 200
            assert app.in_flight.total() == 0

    asyncio.run(run())


def test_all_bodies_together_are_bounded():
    async def run():
        go = asyncio.Event()
        app = gate_of(Route("/api/v1/asample", waits(go), methods=["POST"]), limits=SMALL)
        async with client_of(app) as client:

            def post():
                return client.post("/api/v1/asample", content=b"x" * 1000)

            running = [asyncio.create_task(post()) for _ in range(4)]
            while app.budget.used < 16_000:
                await asyncio.sleep(0)
            refused = await post()
            assert refused.status_code == 429
            assert "16000 bytes" in refused.json()["detail"]
            go.set()
            assert [(await task).status_code for task in running] == [200] * 4
            assert app.budget.used == 0

    asyncio.run(run())


# -- what is said and logged


def logged(caplog):
    """Every record of the service's own logger: the test's client logs whole addresses."""
    found = (record for record in caplog.records if record.name == "mint_jax.service")
    return "".join(str(record.__dict__) for record in found)


def lines(caplog):
    return [
        json.loads(record.message)
        for record in caplog.records
        if record.name == "mint_jax.service" and record.levelno == logging.INFO
    ]


def test_one_line_for_each_request_without_keys_queries_or_bodies(keys, secrets, caplog):
    caplog.set_level(logging.DEBUG)
    app, secret = gate_of(keys=keys), secrets["train"]
    path = f"/api/v1/optim_step/{secret}/sk-{secret[-43:]}?key={secret}&prompt=hello"
    answer = ask(app, "POST", path, content=b"the prompt", headers={"x-api-key": secret})
    ask(app, "GET", "/a%0A%7B%22id%22:1%7D" + "y" * 500)
    first, second = lines(caplog)
    assert 0 <= first.pop("ms") < 60_000
    assert first.pop("bytes_out") > 100
    assert first == {
        "id": answer.headers["x-request-id"],
        "tenant": "of-train",
        "key": keys.find(secret).id,
        "method": "POST",
        "path": "/api/v1/optim_step/***/***",
        "status": 200,
        "bytes_in": 10,
    }
    assert (second["status"], len(second["path"])) == (401, 200)
    assert secret[-43:] not in logged(caplog)
    assert "prompt" not in logged(caplog)


async def breaks(_):
    raise RuntimeError("a secret of the house")


@pytest.mark.parametrize("path", ["/api/v1/break", "/v1/break"])
def test_no_traceback_reaches_a_client(caplog, path):
    app = gate_of(Route(path, breaks, methods=["POST"]))
    got = ask(app, "POST", path)
    assert got.status_code == 500
    assert "its log says why" in got.text
    assert "secret" not in got.text
    assert "a secret of the house" in caplog.text
    assert "Traceback" in caplog.text


def test_a_root_path_is_not_part_of_a_rule(keys, secrets):
    for scope, status in (("sample", 200), ("train", 403)):
        headers = bearer(secrets[scope])
        got = ask(gate_of(keys=keys), "POST", "/mint/api/v1/asample", "/mint", headers=headers)
        assert got.status_code == status
