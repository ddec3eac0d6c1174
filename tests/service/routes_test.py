"""The model ``auto`` behind OpenAI's doors: who answers, with which probability, and what rewards
teach; over a base without training, whose prompts differ all the same.
"""

import collections
import dataclasses
import functools

import httpx
import numpy as np
import openai
import pytest

from mint_jax.catalog.packed import Schema, pack
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.rollout.embed import Embedder
from mint_jax.service.routes import BASE, Routes, need
from mint_jax.service.server import Sizes
from mint_jax.service.server_db import Overloaded
from mint_jax.train.blocks import BlockShape
from tests.configs import load
from tests.service.openai_world import random_adapter
from tests.service.sites import sites as sites

CONFIG = AdapterConfig(4, 8.0, ("q", "v"))
SIZES = Sizes(
    slots={4: 1}, adapters={4: 2}, shapes=(BlockShape(1, 1, 32),), max_rows=4, wait_cost=0.1
)
PROMPTS = {
    "digits": ["1 2 3 4 5", "9 8 7 6 5", "4 4 4 1 2"],
    "words": ["the cat sat", "a dog ran far", "some birds sing"],
    "signs": ["?!?! ,,", ";;: !!", "((( )))"],
}


@pytest.fixture(scope="module")
def base(mesh):
    return base_lib.load("tiny-random", mesh)


@pytest.fixture
def site(sites, base, tmp_path, rng):
    """A server with three described policies."""
    site = sites(base, tmp_path / "server", SIZES)
    for name, prompts in PROMPTS.items():
        packed = pack(random_adapter(rng, base, CONFIG), Schema(base.fingerprint, CONFIG))
        site.server.catalog.export(f"default/{name}", packed, 1, create=True)
        post(site, "routes", {"model": name, "prompts": prompts})
    yield site
    if site.is_up:
        site.close()


def post(site, path: str, body: dict) -> dict:
    return httpx.post(f"{site.url}/v1/{path}", json=body).raise_for_status().json()


def api(site) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{site.url}/v1", api_key="-", max_retries=0)


def ask(site, prompt: str, **more):
    body = {"model": "auto", "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
    return api(site).completions.with_raw_response.create(**body)


def test_a_prompt_goes_to_the_policy_that_is_for_it(site):
    catalog = site.server.catalog
    for name, prompts in PROMPTS.items():
        found = collections.Counter()
        for prompt in prompts * 3:
            raw = ask(site, prompt)
            answer = raw.parse()
            policy, _, number = answer.model.partition("@")
            found[policy] += 1
            if policy == "tiny-random":
                assert answer.mint_revision is None
                continue
            assert answer.mint_revision == catalog.resolve(f"{policy}@{number}").digest
            assert raw.headers["x-mint-revision"] == answer.mint_revision
            assert raw.headers["x-mint-feedback"] == answer.id
        assert found.most_common(1)[0][0].endswith(name), found
    chat = api(site).chat.completions.create(
        model="auto", messages=[{"role": "user", "content": "1 2 3"}], max_tokens=1
    )
    parts = api(site).chat.completions.create(
        model="auto", messages=[{"role": "user", "content": "1 2"}], max_tokens=2, stream=True
    )
    assert {part.model for part in parts} != {"auto"}
    response = api(site).responses.create(model="auto", input="1 2 3", max_output_tokens=1)
    for id in (chat.id, response.id):
        assert post(site, "feedback", {"id": id, "reward": 0.5})["state"] is None


def test_a_policys_alias_serving_comes_before_its_newest_revision(site, rng):
    server = site.server
    data = pack(random_adapter(rng, server.base, CONFIG), Schema(server.base.fingerprint, CONFIG))
    server.catalog.promote("default/digits", 1)
    server.catalog.export("default/digits", data, 2)
    server.catalog.export("default/words", data, 2)
    options = post(site, "route", {"prompt": "1 2 3 4"})["options"]
    found = {one["model"].rpartition("/")[2] for one in options}
    assert found >= {"digits@1", "words@2"}
    canary = server.catalog.open_canary("digits", 2, share=0.5, guard="reward>=parent-0.1")
    for _ in range(6):
        answer = ask(site, "1 2 3 4").parse()
        if "digits" in answer.model:
            about = post(site, "feedback", {"id": answer.id, "reward": 1})
            assert (about["canary"], about["state"]) == (canary.id, "open")
    assert sum(server.catalog.canary(canary.id).evidence.answers) > 0


def test_a_reward_of_which_half_was_written_is_taken_again(site, rng, monkeypatch):
    """A canary's answer that ``auto`` drew: the second write failed, and the client repeats."""
    server = site.server
    data = pack(random_adapter(rng, server.base, CONFIG), Schema(server.base.fingerprint, CONFIG))
    server.catalog.promote("default/digits", 1)
    server.catalog.export("default/digits", data, 2)
    canary = server.catalog.open_canary("digits", 2, share=0.5, guard="reward>=parent-0.1")
    answers = (ask(site, "1 2 3 4").parse() for _ in range(100))
    body = {"id": next(a.id for a in answers if "digits" in a.model), "reward": 1}

    def refuse(*_):
        raise Overloaded("the queue is full")

    with monkeypatch.context() as patch:
        patch.setattr(server.canaries, "feedback", refuse)
        with pytest.raises(httpx.HTTPStatusError, match="429"):
            post(site, "feedback", body)
    assert post(site, "feedback", body)["canary"] == canary.id
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        post(site, "feedback", body)
    assert server.routes._bandit("default").rewards == 1
    assert sum(server.catalog.canary(canary.id).evidence.answers) == 1


def test_options_have_the_probabilities_of_the_draw(site):
    """The same vectors and cosines as the base gives, and every draw is written with its own."""
    prompt = "5 6 7 8"
    options = post(site, "route", {"prompt": prompt})["options"]
    assert {one["model"].partition("@")[0].rpartition("/")[2] for one in options} == {
        "tiny-random",
        *PROMPTS,
    }
    assert sum(one["propensity"] for one in options) == pytest.approx(1)
    base = site.server.base
    encode = base.need_tokenizer().encode
    embed = Embedder(base)
    means = {n: embed([encode(p) for p in some]).mean(0) for n, some in PROMPTS.items()}
    # as the catalog stores them
    means = {name: mean.astype(np.float16).astype(np.float32) for name, mean in means.items()}
    centre = np.mean([*means.values()], axis=0)
    [query] = embed([encode(prompt)]) - centre
    for one in options:
        if one["cosine"] is not None:
            name = one["model"].partition("@")[0].rpartition("/")[2]
            mean = means[name] - centre
            wanted = mean @ query / np.linalg.norm(mean) / np.linalg.norm(query)
            assert one["cosine"] == pytest.approx(wanted, abs=1e-3)  # the index's mean is float16's
    answer = ask(site, prompt).parse()
    key = answer.id.removeprefix("cmpl-")
    [[policy, propensity]] = site.server.database.read(
        "SELECT policy, propensity FROM choices WHERE id = ?", key
    )
    named = {one["model"]: one["propensity"] for one in options}
    assert propensity == pytest.approx(named[answer.model], rel=0.5), "loads change the estimate"
    assert (policy == BASE) == (answer.mint_revision is None)


def test_rewards_teach_and_outlive_a_restart(site, sites, base, rng):
    """Two policies are for the same prompts; in the end the one with the higher rewards answers."""
    packed = pack(random_adapter(rng, base, CONFIG), Schema(base.fingerprint, CONFIG))
    site.server.catalog.export("default/numbers", packed, 1, create=True)
    post(site, "routes", {"model": "numbers", "prompts": ["8 8 2 1", "5 6 5 3 1"]})

    def reward_of(answer) -> float:
        return 1.0 if "numbers" in answer.model else 0.2 if "digits" in answer.model else 0.0

    best: list[bool] = []
    # of 400 simulated bandits with these cosines none needed more than 17 answers
    while sum(best[-10:]) < 8:
        assert len(best) < 500, "what earns more is preferred"
        answer = ask(site, "1 2 3 4").parse()
        post(site, "feedback", {"id": answer.id, "reward": reward_of(answer)})
        best.append(reward_of(answer) == 1)
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        post(site, "feedback", {"id": answer.id, "reward": 1.0})
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        post(site, "feedback", {"id": "cmpl-unknown", "reward": 1.0})

    def learned(site) -> list:
        found = post(site, "route", {"prompt": "1 2 3 4"})["options"]
        return sorted(
            (one["model"], one["cosine"], pytest.approx(one["reward"], rel=1e-9))
            for one in found
            if one["cosine"]
        )

    before = learned(site)
    site.close()
    again = sites(base, site.server.folder, SIZES)
    assert learned(again) == before  # sums in another order
    again.close()


def test_a_budget_leaves_out_what_is_not_loaded(site, monkeypatch):
    monkeypatch.setattr(site.server.residency, "eta_s", lambda digest: 2.0)
    options = post(site, "route", {"prompt": "1 2 3", "mint_budget_s": 1})["options"]
    assert [one["model"] for one in options] == ["tiny-random"]
    assert ask(site, "1 2 3", extra_body={"mint_budget_s": 0.5}).parse().mint_revision is None
    assert len(post(site, "route", {"prompt": "1 2 3", "mint_budget_s": 2})["options"]) == 4


def test_a_policy_that_is_removed_retired_or_another_tenants_is_no_option(site, rng):
    server = site.server
    server.catalog.describe("default/signs", None)
    server.catalog.retire("default/words")
    data = pack(random_adapter(rng, server.base, CONFIG), Schema(server.base.fingerprint, CONFIG))
    server.catalog.export("other/spy", data, 1, create=True)
    [vector] = server.vectors([server.base.need_tokenizer().encode("1 2 3")])
    server.catalog.describe("other/spy", vector, 1)
    server.routes.refresh()
    for _ in range(2):
        options = post(site, "route", {"prompt": "1 2 3"})["options"]
        assert {one["model"].partition("@")[0].rpartition("/")[2] for one in options} == {
            "tiny-random",
            "digits",
        }


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("route", {"prompt": ""}, "prompt"),
        ("route", {"prompt": "a", "mint_budget_s": -1}, "mint_budget_s"),
        ("routes", {"model": "unknown", "prompts": ["a"]}, "not in the catalog"),
        ("routes", {"model": "digits"}, "prompts"),
        ("routes", {"model": "digits", "prompts": [""]}, "prompts"),
        ("routes", {"model": "other/x", "prompts": ["a"]}, "other"),
        ("completions", {"model": "auto", "prompt": ["a", "b"]}, "auto takes one"),
    ],
)
def test_what_cannot_be_routed_is_refused(site, path, body, reason):
    answer = httpx.post(f"{site.url}/v1/{path}", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert reason in answer.text


def test_a_server_without_routing_says_so(sites, base, tmp_path):
    site = sites(base, tmp_path, dataclasses.replace(SIZES, wait_cost=None))
    assert httpx.post(f"{site.url}/v1/route", json={"prompt": "a"}).status_code == 400
    body = {"model": "auto", "prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{site.url}/v1/completions", json=body).status_code == 404
    with pytest.raises(UserError, match="start it with --config"):
        need(None)
    site.close()


def test_routing_needs_its_package(monkeypatch):
    from mint_jax.harness import options

    config = load("configs/serve.py:ci", "--config.routing=True")
    config.preflight()
    found = options.importlib.util.find_spec
    monkeypatch.setattr(
        options.importlib.util, "find_spec", lambda name: None if name == "faiss" else found(name)
    )
    with pytest.raises(UserError, match="routing needs the package faiss"):
        config.preflight()


def test_a_disk_that_refuses_costs_the_reward_and_not_the_answer(site, monkeypatch):
    routes = site.server.routes

    def refuse(*_):
        raise Overloaded("the queue is full")

    [vector] = site.server.vectors([site.server.base.need_tokenizer().encode("1 2 3")])
    answer = ask(site, "1 2 3").parse()
    with monkeypatch.context() as patch:
        patch.setattr(routes._database, "write", refuse)
        assert routes.choose("default", vector, "lost").name
        with pytest.raises(Overloaded):
            routes.feedback("default", answer.id, 1.0)
    assert not routes.feedback("default", "lost", 1.0)
    assert routes._bandit("default").rewards == 0, "what was not acknowledged is not learned"
    assert routes.feedback("default", answer.id, 1.0)
    assert routes._bandit("default").rewards == 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_prompt_whose_state_is_not_finite_goes_to_the_base(site, wrong):
    [vector] = site.server.vectors([(1, 2, 3)])
    vector[3] = wrong
    [alone] = site.server.routes.options("default", vector)
    assert (alone.model.digest, alone.option.propensity) == (None, 1.0)


def test_one_draw_is_that_of_its_answers_name(site):
    """So a request that is repeated, by a front for example, goes to the same policy."""
    routes: Routes = site.server.routes
    [vector] = site.server.vectors([site.server.base.need_tokenizer().encode("1 2 3")])
    draw = functools.partial(routes.choose, "default", vector)
    for key in map(str, range(20)):
        assert draw(key) == draw(key)
