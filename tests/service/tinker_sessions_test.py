"""The official SDK searches sessions, moves them into projects and exports their timelines."""

import functools
import json
import urllib.request
from typing import Any

import pytest
import tinker
from tinker import types
from tinker.types import session_status_query as queries
from tinker.types.session_status import (
    ClientSessionFinished,
    ClientSessionFinishErrored,
    SessionActive,
)

from tests.service.sites import KEY, site, sites  # noqa: F401 (fixtures)


@pytest.fixture(scope="module")
def made(site) -> dict[str, Any]:  # noqa: F811
    """Sessions: one that has trained, one that finished, one that goes on."""
    of = functools.partial(tinker.ServiceClient, base_url=site.url, api_key=KEY)
    one = of(user_metadata={"run": "a", "by": "x"}, display_name="The First Run")
    trainer = one.create_lora_training_client(site.server.name, 8).result()
    tokens, inputs = types.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]}
    data = [types.Datum(model_input=tokens, loss_fn_inputs=inputs | {"weights": [1.0] * 3})]
    for _ in range(2):
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
    path = trainer.save_weights_for_sampler("one").result().path
    one.create_sampling_client(path)
    notes = {"run": "b", "by": "x"}
    two = of(user_metadata=notes, project_id="p", display_name="second run")
    three = of(display_name="another")
    ids = [client.holder.get_session_id() for client in (one, two, three)]
    reason = {"reason": {"type": "errored"}, "detail": "out of money"}
    assert site.post(f"sessions/{ids[1]}/finish", reason).status_code == 200
    return {
        "ids": ids,
        "model": trainer.model_id,
        "path": path,
        "rest": one.create_rest_client(),
        "clients": (one, two, three),
    }


def found(made, **asked) -> list[str]:
    return [one.session_id for one in page(made, **asked).sessions]


def page(made, **asked) -> types.SessionSearchResponse:
    return made["rest"].search_sessions(types.SessionSearchRequest(**asked)).result()


def test_sessions_are_searched(made, site):  # noqa: F811
    one, two, three = made["ids"]
    finished = queries.ClientFinishedSessionStatusQuery
    both = [queries.FailedSessionStatusQuery(), finished(reasons=["errored", "success"])]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, [three, two, one]),  # the newest first
        ({"session_id": two}, [two]),
        ({"session_id": "nothing"}, []),
        ({"display_name": "RUN"}, [two, one]),
        ({"display_name": "run first"}, [one]),
        ({"display_name": "another", "session_id": one}, [three, one]),  # either
        ({"user_metadata": {"by": "x"}}, [two, one]),
        ({"user_metadata": {"by": "x", "run": "a"}}, [one]),
        ({"project_ids": ["p", "q"]}, [two]),
        ({"owner": {"type": "accessible"}}, [three, two, one]),
        ({"owner": {"type": "user", "owner_urns": ["default"]}}, [three, two, one]),
        ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, []),
        ({"statuses": [queries.ActiveSessionStatusQuery()]}, [three, one]),
        ({"statuses": [finished()]}, [two]),
        ({"statuses": [finished(reasons=["success"])]}, []),
        ({"statuses": both}, [two]),
    ]
    for query, expected in cases:
        assert found(made, **query) == expected, query
    refused = site.post("sessions/search", {"owner": {"type": "user"}})
    assert (refused.status_code, "owner.owner_urns" in refused.text) == (400, True)


def test_pages_follow_a_cursor(made, site):  # noqa: F811
    first = page(made, limit=3).sessions[-1]
    assert (first.owner, first.checkpoints_count, first.status) == ("default", 1, SessionActive())
    assert first.checkpoint_storage_bytes == site.server.book.checkpoint_totals("default")[1]
    (second,) = page(made, display_name="second").sessions
    errored = ClientSessionFinished(reason=ClientSessionFinishErrored(), detail="out of money")
    assert second.status == errored
    seen, cursor = [], None
    for _ in range(4):
        got = page(made, limit=1, cursor=cursor)
        seen += [one.session_id for one in got.sessions]
        if (cursor := got.next_cursor) is None:
            break
    assert seen == made["ids"][::-1]


def test_sessions_are_moved_into_projects(made):
    rest, (one, _, _) = made["rest"], made["ids"]
    assert rest.list_training_runs(project_id="moved").result().training_runs == []
    rest.assign_session_project(one, "moved").result()
    assert found(made, project_ids=["moved"]) == [one]
    runs = rest.list_training_runs(project_id="moved").result()
    assert [run.training_run_id for run in runs.training_runs] == [made["model"]]
    assert runs.cursor.total_count == 1
    # what else was told stays
    assert page(made, session_id=one).sessions[0].display_name == "The First Run"
    with pytest.raises(tinker.NotFoundError):
        rest.assign_session_project("nothing", "moved").result()


def test_a_timeline_is_downloaded_without_a_key(made, site):  # noqa: F811
    site.server.maintain()  # updates are written down
    url = made["rest"].export_session_trace(made["ids"][0]).result()
    with urllib.request.urlopen(url) as answer:
        events = json.load(answer)["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert {made["model"], f"session {made['ids'][0]}"} < set(rows)
    mine = [event for event in events if event["tid"] == rows[made["model"]]]
    life = next(event for event in mine if event["ph"] == "X")
    updates = [event for event in mine if event["name"] == "update"]
    assert [event["args"]["number"] for event in updates] == [1, 2]
    assert all(event["args"]["loss"] > 0 for event in updates)
    saved = next(event for event in mine if event["name"] == "sampler_weights/one")
    for event in (*updates, saved):
        assert life["ts"] <= event["ts"] <= life["ts"] + life["dur"]
    with pytest.raises(tinker.NotFoundError):
        made["rest"].export_session_trace("nothing").result()
