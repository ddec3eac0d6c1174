"""A canary behind OpenAI's doors: who answers, rewards, decisions, and kill -9 in between."""

import signal
import subprocess
import sys

import httpx
import openai
import pytest
import sqlalchemy as sa

from mint_jax.service.canaries import KEEP_S, Canaries, uniform
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.validation import BadRequest
from mint_jax.service.weights import Model
from tests.service.canaries_killed import begin, judged
from tests.service.openai_world import client as client
from tests.service.openai_world import world as world

ASKED = {"model": "chat@serving", "max_tokens": 1, "temperature": 0}
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture
def canary(world):
    """An open canary of the second revision; it has ended after the test."""
    opened = world.catalog.open_canary("chat", 2, share=0.5, guard="reward>=parent-0.1")
    yield opened
    if world.catalog.canary(opened.id).state == "open":
        world.catalog.end_canary("chat")


def revision_of(world, canary, id: str) -> str:
    """The digest that the draw of an answer's id gives."""
    is_candidate = uniform(canary.id, id.rsplit("-", 1)[-1].removeprefix("resp_")) < canary.share
    return world.digests[f"chat@{2 if is_candidate else 1}"]


def test_each_request_is_answered_by_the_revision_that_its_id_draws(world, client, canary):
    found = []
    for _ in range(24):
        raw = client.completions.with_raw_response.create(prompt="Hi", **ASKED)
        answer = raw.parse()
        assert raw.headers["x-mint-feedback"] == answer.id
        assert raw.headers["x-mint-revision"] == answer.mint_revision
        assert answer.mint_revision == revision_of(world, canary, answer.id)
        found.append(answer.mint_revision)
    assert set(found) == {world.digests["chat@1"], world.digests["chat@2"]}
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **ASKED):
        last = chunk
    assert last.mint_revision == revision_of(world, canary, last.id)
    response = client.responses.create(model="chat@serving", input="Hi", max_output_tokens=1)
    assert response.mint_revision == revision_of(world, canary, response.id)
    for model in ("chat", "chat@1", world.digests["chat@2"], "tiny-random"):
        raw = client.completions.with_raw_response.create(prompt="Hi", **ASKED | {"model": model})
        assert "x-mint-feedback" not in raw.headers
    for id in (answer.id, last.id, response.id):
        taken = httpx.post(f"{world.url}/v1/feedback", json={"id": id, "reward": 1}).json()
        expected = {"object": "feedback", "id": id, "reward": 1.0, "canary": canary.id}
        assert taken == expected | {"state": "open"}
    assert sum(world.catalog.canary(canary.id).evidence.answers) == 3


def test_an_alias_without_a_canary_costs_no_read(world, client, canary, monkeypatch):
    world.catalog.promote("chat", 2, "quiet")
    statements, other, engine = [], [], world.catalog.database.engine

    def count(*about) -> None:
        statements.append(about[2])

    sa.event.listen(engine, "before_cursor_execute", count)
    for name in ("read", "write"):
        monkeypatch.setattr(ServerDatabase, name, lambda *a, **k: other.append(a))
    client.completions.create(prompt="Hi", **ASKED | {"model": "chat@quiet"})
    monkeypatch.undo()
    assert (len(statements), other) == (1, []), "the name is resolved, as ever"
    client.completions.create(prompt="Hi", **ASKED)
    sa.event.remove(engine, "before_cursor_execute", count)
    assert len(statements) == 1 + 2, "the name, and the canary"


def test_rewards_decide_and_then_the_parent_answers_alone(world, client, canary):
    state = "open"
    while state == "open":
        answer = client.completions.create(prompt="Hi", **ASKED)
        reward = float(answer.mint_revision == world.digests["chat@1"])
        taken = client.post("/feedback", body={"id": answer.id, "reward": reward}, cast_to=object)
        state = taken["state"]
    assert state == "rolled back"
    answers = world.catalog.canary(canary.id).evidence.answers
    assert max(answers) < 60
    raw = client.completions.with_raw_response.create(prompt="Hi", **ASKED)
    assert raw.headers["x-mint-revision"] == world.digests["chat@1"]
    assert "x-mint-feedback" not in raw.headers
    late = client.completions.create(prompt="Hi", **ASKED | {"model": "chat@1"})
    assert late.mint_revision == world.digests["chat@1"]


def test_wrong_feedback_is_refused_in_openais_form(world, client, canary):
    id = client.completions.create(prompt="Hi", **ASKED).id

    def refused(body: dict, **headers: str) -> tuple[int, str | None, str]:
        found = httpx.post(f"{world.url}/v1/feedback", json=body, headers=headers)
        error = found.json()["error"]
        return found.status_code, error["param"], error["message"]

    words_of = {1.01: "at most 1", -0.1: "at least 0", "1": "a number"}
    for reward, words in (words_of | {None: ""}).items():
        status, param, message = refused({"id": id, "reward": reward})
        assert (status, param, words in message) == (400, "reward", True)
    assert refused({"id": id})[:2] == (400, "reward")
    assert refused({"reward": 1})[:2] == (400, "id")
    assert refused({"id": "cmpl-other", "reward": 1})[:2] == (404, "id")
    assert refused({"id": id, "reward": 1}, **{"x-tenant": "a"})[:2] == (404, "id")
    client.post("/feedback", body={"id": id, "reward": 0.5}, cast_to=object)
    status, param, message = refused({"id": id, "reward": 0.5})
    assert (status, param) == (400, "id")
    assert "has the reward 0.5: an answer has one" in message
    with pytest.raises(openai.BadRequestError, match="expected at most 1"):
        client.post("/feedback", body={"id": id, "reward": 2}, cast_to=object)


# -- without a base


@pytest.mark.parametrize("before", [True, False])
def test_a_kill_between_feedback_and_decision_loses_and_repeats_nothing(memory, before):
    canary, given = begin(memory), 0
    for rewards in (3, 2):
        arguments = (memory, int(before), rewards)
        command = [sys.executable, "-m", "tests.service.canaries_killed", *arguments]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert (done.returncode, done.stdout.count("\n")) == (-signal.SIGKILL, rewards - 1)
        given += rewards
    with judged(memory) as (catalog, database):
        had = sum(catalog.canary(canary).evidence.answers)
        assert had == (given - 1 if before else given)
        Canaries(database, catalog, lambda: 5.0).catch_up()
        found = catalog.canary(canary).evidence
        assert (sum(found.answers), sum(found.total)) == (given, given / 2)


def test_a_failing_catalog_delays_the_judge_and_answers_are_forgotten_after_a_week(memory):
    canary, now = begin(memory), 5.0
    with judged(memory) as (catalog, database):
        canaries = Canaries(database, catalog, lambda: now)
        model = Model("chat@serving", canary=canary)
        canaries.drawn(model, "default", "one")
        catalog.database.close()
        with sa.create_engine(catalog.database.url).connect() as other:
            other.exec_driver_sql("BEGIN EXCLUSIVE")
            catalog.database.timeout_s = 0.1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("mint_jax.catalog.records.database.ATTEMPTS", 1)
                sa.event.listen(
                    catalog.database.engine,
                    "connect",
                    lambda c, _: c.execute("PRAGMA busy_timeout=50"),
                )
                assert canaries.feedback("default", "cmpl-one", 1.0) is None
        canaries.catch_up()
        assert sum(catalog.canary(canary).evidence.answers) == 1
        now += KEEP_S + 1
        canaries.catch_up()
        assert database.read("SELECT * FROM draws") == database.read("SELECT * FROM rewards") == []
        with pytest.raises(BadRequest, match="it is a week old"):
            canaries.feedback("default", "cmpl-one", 1.0)
