"""The console without a browser: who sees and moves what, sessions and forms, names that are
scripts, headers; pages read by a parser.
"""

import dataclasses
import hashlib
import html.parser
import itertools
import json
import re
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from mint_jax.models import base as base_lib
from mint_jax.service import keys as keys_lib
from mint_jax.service.console import visit
from mint_jax.service.console.pages import console_routes
from mint_jax.service.console.sessions import COOKIE, Browsers
from mint_jax.service.costs import Payer
from mint_jax.service.gate import Gate
from mint_jax.service.keys import Keys
from mint_jax.service.training_calls import ForwardBackward, Optim, Trained
from mint_jax.train.blocks import Datum
from mint_jax.train.losses import LossCoefs
from mint_jax.train.state import OptimizerConfig
from tests.service.console_server import EVIL, furnish
from tests.service.gate_test import ask
from tests.service.sites import sites  # noqa: F401 (a fixture)

SCOPES = {"ann": ("read", "sample", "train"), "eve": ("read",), "sam": ("sample",)}
SCOPES["root"] = ("admin",)
COEFS = LossCoefs(0, 0, 0, 0, 0.0, 0.0, np.inf, 0)  # of cross-entropy
VENDORED = r"`([\w.-]+)` \| `([0-9a-f]{64})`"
VOID = {"meta", "link", "input", "img", "br", "hr", "rect", "path"}


class Parsed(html.parser.HTMLParser):
    """A page's elements as (tag, attributes), and its text; every opened element is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [
            have for one, have in self.elements if one == tag and attributes.items() <= have.items()
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def secrets(folder):
    return {tenant: keys_lib.add(folder, tenant, scopes)[1] for tenant, scopes in SCOPES.items()}


@pytest.fixture(scope="module")
def keys(folder, secrets):
    # which looks at its file every time
    return Keys(folder, monotonic=itertools.count(0, 2).__next__)


@pytest.fixture(scope="module")
def guarded(sites, mesh, keys):  # noqa: F811
    """A furnished site with keys, and a model of ann's that has made some updates."""
    site = sites(base_lib.load("tiny-random", mesh), keys=keys)
    furnish(site.server.catalog, site.server.base, np.random.default_rng())
    session = site.server.book.open_session("ann", {})
    site.server.book.add_model(session, 0, "ann", {"rank": 8, "metadata": {"run": EVIL}})
    return site


@pytest.fixture(scope="module")
def model(guarded):
    return guarded.server.book.models("ann", 1, 0)[0].id


def browser(site, secret: str | None = None) -> httpx.Client:
    """Signed in, where there is a key."""
    client = httpx.Client(base_url=site.url, headers={"origin": site.url}, timeout=60)
    if secret is not None:
        answer = client.post("/console/sign-in", data={"key": secret})
        assert answer.status_code == 303, answer.text
    return client


@pytest.fixture(scope="module")
def people(guarded, secrets):
    clients = {who: browser(guarded, secret) for who, secret in secrets.items()}
    yield clients
    for client in clients.values():
        client.close()


def page(client: httpx.Client, path: str, status: int = 200) -> Parsed:
    answer = client.get("/console/" + path)
    assert answer.status_code == status, answer.text
    return Parsed(answer.text)


def test_a_session_is_a_cookie_for_a_key_and_ends_with_it(guarded, keys, folder, caplog):
    client = browser(guarded)
    caplog.set_level("INFO", "mint_jax.service")
    first = client.get("/console/policies")
    assert first.status_code == 303
    assert first.headers["location"] == "/console/sign-in?next=%2Fconsole%2Fpolicies"
    part = client.get("/console/policies", headers={"hx-request": "true"})
    assert part.status_code == 401  # htmx would put the sign-in page into this one
    assert part.headers["hx-redirect"].startswith("/console/sign-in")
    shown = page(client, "sign-in?next=/console/training")
    assert [have["value"] for have in shown.all("input", name="next")] == ["/console/training"]

    key, secret = keys_lib.add(folder, "ann", ["read"])
    form = {"key": f" {secret}\n", "next": "/console/training"}
    taken = client.post("/console/sign-in", data=form)
    assert (taken.status_code, taken.headers["location"]) == (303, "/console/training")
    flags = set(taken.headers["set-cookie"].split("; "))
    assert {"HttpOnly", "SameSite=strict", "Path=/console"} <= flags
    assert "Secure" not in flags  # loopback without TLS
    assert client.get("/console/training").status_code == 200
    for path in ("/v1/models", "/api/v1/training_runs"):
        assert client.get(path).status_code == 401  # the cookie is the console's alone
    proxied = {"host": "mint.example", "origin": "https://mint.example"}
    form = {"key": secret, "next": "//evil.example/console/"}
    elsewhere = client.post("/console/sign-in", data=form, headers=proxied)
    assert elsewhere.headers["location"] == "/console"
    assert "Secure" in elsewhere.headers["set-cookie"].split("; ")
    assert client.post("/console/sign-in", data={"key": "sk-no"}).status_code == 401

    client.cookies.clear()
    client.post("/console/sign-in", data={"key": secret})
    cookie = client.cookies[COOKIE]
    assert client.post("/console/sign-out").headers["location"] == "/console/sign-in"
    old = {"cookie": f"{COOKIE}={cookie}"}
    assert client.get("/console/training", headers=old).status_code == 303
    client.cookies.clear()
    client.post("/console/sign-in", data={"key": secret})
    keys_lib.revoke(folder, key.id)
    assert client.get("/console/training").status_code == 303
    logged = " ".join(record.getMessage() for record in caplog.records)
    assert secret[-43:] not in logged
    assert cookie not in logged


def test_tenants_see_their_own_and_operators_all(people):
    shown = {who: page(people[who], "policies").text for who in ("ann", "eve", "root")}
    seen = {who: {"ann/chat", "bob/secret"} & set(text.split()) for who, text in shown.items()}
    assert seen == {"ann": {"ann/chat"}, "eve": set(), "root": {"ann/chat", "bob/secret"}}
    missing = page(people["ann"], "policies/bob/nothing", 404).text
    hidden = page(people["ann"], "policies/bob/secret", 404).text
    assert hidden == missing.replace("bob/nothing", "bob/secret")
    for who, path in ("ann", "server"), ("sam", "policies"):
        assert people[who].get(f"/console/{path}").status_code == 403
    shown = page(people["root"], "policies/bob/secret")
    assert shown.all("form", action="/console/promote/bob/secret")


def test_a_list_is_searched_and_paged(people, guarded, monkeypatch):
    def rows(text):
        return re.findall(r'href="/console/policies/([^"?]+)"', text)

    part = people["ann"].get("/console/policies?match=SHORT", headers={"hx-request": "true"})
    assert "<html" not in part.text
    assert rows(part.text) == ["ann/chat-short"]
    # no wildcard
    assert rows(people["ann"].get("/console/policies?match=%25").text) == ["ann/" + quote(EVIL)]
    assert "No policy has q{z in its name" in page(people["ann"], "policies?match=q{z").text
    assert people["ann"].get("/console/policies?state=odd").status_code == 400
    monkeypatch.setattr("mint_jax.service.console.pages.LISTED", 2)
    seen, path = [], "/console/policies?match=c"
    while path:
        text = people["root"].get(path).text
        seen += rows(text)
        path = next((have["href"] for have in Parsed(text).all("a", rel="next")), None)
    everything = [one.policy for one in guarded.server.catalog.policies(match="c")]
    assert seen == [quote(name, safe="/") for name in everything]


def test_a_policys_page_shows_its_scores_and_log(people, guarded):
    shown = page(people["ann"], "policies/ann/chat")
    for text in ("rank 2, alpha 4", "the first that answers", "1 → 3", "promote"):
        assert text in shown.text
    assert not re.findall(r"^\s*rollout\b", shown.text, re.M)
    whole = page(people["ann"], "policies/ann/chat?log=all").text
    assert len(re.findall(r"^\s*rollout\b", whole, re.M)) == 12
    catalog = guarded.server.catalog
    digests = [have.get("title") for have in shown.all("code")]
    assert catalog.revision("ann/chat", 2).digest in digests
    for number in (1, 2, 3):
        score = catalog.evaluations(f"ann/chat@{number}")[0].isolated
        assert f"{score:,.4g}" in shown.text


def test_curves_are_losses_of_a_target_and_gradient_norms(people, guarded, model, rng):
    """Summed over both requests of an update, by the weights of their targets."""
    curves, losses = guarded.server.curves, rng.uniform(1, 9, (6, 2))
    norms = [*rng.uniform(0, 2, 5), float("inf")]
    tokens = np.zeros(4, np.int32)
    for pair, norm in zip(losses, norms):
        for weight, loss in zip((1.0, -0.5), pair):
            call = ForwardBackward([Datum(tokens, tokens, np.full(4, weight, np.float32))], COEFS)
            curves.record(model, call, Trained([], loss))
            curves.record(model, dataclasses.replace(call, backward=False), Trained([], 99.0))
        curves.record(model, Optim(OptimizerConfig()), {"grad_norm": norm})
    curves.record(model, Optim(OptimizerConfig()), {"grad_norm": 1.0})  # without a loss
    named = page(people["ann"], f"policies/{quote('ann/' + model)}")
    assert "Nothing of it was saved" in named.text
    plots = named.all("div", role="img")
    shown = {have["data-curve"]: json.loads(have["data-points"] or "") for have in plots}
    assert shown.keys() == {"loss", "gradient norm"}
    loss = [*(losses.sum(1) / 6.0).tolist(), None]
    assert (shown["loss"]["x"], shown["loss"]["y"]) == (list(range(1, 8)), loss)
    assert shown["gradient norm"]["y"] == [*norms[:5], None, 1.0]
    assert [number for number, _ in curves.of(model, 3)] == [3, 6, 7]
    assert model in page(people["ann"], "training").text
    assert model not in page(people["eve"], "training").text


def test_a_move_needs_a_reason_a_right_and_a_form_of_ours(people, guarded):
    catalog = guarded.server.catalog

    def at() -> int:
        found = {alias.name: alias.number for alias in catalog.aliases("ann/chat")}
        return found["serving"]

    began, path = at(), "/console/promote/ann/chat"
    form = {"revision": "2", "alias": "serving", "why": f"because {EVIL}"}
    for who, change, headers, status in (
        ("ann", {"why": " "}, {}, 400),
        ("ann", {"revision": "99"}, {}, 400),
        ("ann", {"version": "1"}, {}, 400),  # the alias has moved since
        ("ann", {}, {"origin": "null"}, 403),
        ("eve", {}, {}, 403),  # scope read alone
        ("ann", {}, {"origin": "https://evil.example"}, 403),
        ("ann", {}, {"sec-fetch-site": "same-site"}, 403),
    ):
        got = people[who].post(path, data=form | change, headers=headers)
        assert got.status_code == status, (who, change, headers)
    other = people["ann"].post("/console/promote/bob/secret", data=form | {"revision": "1"})
    assert other.status_code == 404
    assert at() == began
    moved = people["ann"].post(path, data=form)
    assert moved.headers["location"] == "/console/policies/ann/chat?done=promoted"
    assert at() == 2
    entry = catalog.audit("ann/chat", newest=True, limit=1)[0]
    assert (entry.action, entry.actor, entry.why) == ("promote", "ann in the console", form["why"])
    back = {"alias": "serving", "why": "worse", "version": str(entry.version)}
    moved = people["root"].post("/console/rollback/ann/chat", data=back)
    assert moved.headers["location"].endswith("?done=rolled-back")
    assert at() == began
    assert catalog.audit("ann/chat", newest=True, limit=1)[0].actor == "root in the console"


def test_names_and_reasons_that_are_scripts_are_only_text(people, guarded):
    evil = quote(EVIL)
    paths = f"policies/ann/{evil}", f"policies?match={evil}", "policies/ann/chat", "training"
    for path in paths:
        shown = page(people["ann"], path)
        assert not shown.all("img"), path
        assert EVIL in shown.text.replace("run=", ""), path
        sources = {(have.get("src") or "")[:16] for have in shown.all("script")}
        assert sources == {"/console/static/"}, "nothing inline"
        names = {name for _, have in shown.elements for name in have}
        assert not [name for name in names if name == "style" or name.startswith("on")], path
    wrong = page(people["ann"], f"policies/{quote('<script>alert(1)</script>')}", 404)
    assert "<script>alert(1)" in wrong.text


def test_every_page_forbids_what_it_does_not_need(people, guarded):
    answer = people["root"].get("/console/server")
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    recorded = dict(re.findall(VENDORED, (visit.STATIC / "VENDORED.md").read_text()))
    files = visit.STATIC.glob("*.min.*")
    assert recorded == {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in files}
    for path in visit.STATIC.iterdir():
        found = httpx.get(f"{guarded.url}/console/static/{path.name}")
        assert found.content == path.read_bytes()
        if path.suffix == ".js":
            assert found.headers["content-type"].startswith("text/javascript")
    for name in ("..%2fvisit.py", "none.js", "%2e%2e/visit.py"):
        assert people["root"].get(f"/console/static/{name}").status_code == 404


def test_the_server_is_shown_to_operators(people, guarded, monkeypatch):
    shown = page(people["root"], "server")
    assert "ready" in shown.text
    meters = [have["aria-label"] for have in shown.all("svg", role="meter")]
    assert meters[:2] == ["rank 8", "host cache"]
    part = people["root"].get("/console/server", headers={"hx-request": "true"}).text
    assert ("<html" in part, "Residency" in part) == (False, True)
    monkeypatch.setattr(guarded.server.durable, "failed", OSError("no space left"))
    assert "no space left" in page(people["root"], "server").text


def test_costs_are_shown_to_those_who_made_them_and_to_operators(people, guarded):
    shares = {Payer("ann", "ann-s-model"): 1, Payer("bob", EVIL): 2}
    guarded.server.costs.charge("train", 90.0, shares)
    whole, own = page(people["root"], "costs"), page(people["ann"], "costs")
    assert [len(one.all("table")) for one in (whole, own)] == [2, 1]
    assert [text in whole.text for text in (EVIL, "1 min")] == [True, True]
    assert [text in own.text for text in ("ann-s-model", "30.0 s", EVIL)] == [True, True, False]


def test_without_keys_it_is_open_to_this_machine_alone(guarded):
    routes = console_routes(guarded.server, Browsers(None))
    app, ours = Gate(Starlette(routes=routes), None), {"origin": "http://localhost"}
    assert ask(app, "GET", "/console/sign-in").headers["location"] == "/console"
    shown = Parsed(ask(app, "GET", "/console/policies").text)
    assert "bob/secret" in shown.text
    assert not shown.all("form", action="/console/sign-out")
    for host, status in {"evil.example:80": 403, "": 403, "[::1]:80": 200}.items():
        assert ask(app, "GET", "/console/policies", headers={"host": host}).status_code == status
    form = {"why": "y", "revision": "1", "alias": "x"}
    for headers, status in (({}, 403), (ours, 303)):  # no page sent the first
        got = ask(app, "POST", "/console/promote/bob/secret", data=form, headers=headers)
        assert got.status_code == status
