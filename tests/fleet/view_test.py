"""Where requests go: ids that name engines, merged lists, replicas by demand, refused settings."""

import json

import pytest

from mint_jax.errors import UserError
from mint_jax.fleet import places, view
from mint_jax.fleet.chooser import homes_of
from mint_jax.fleet.engine import EngineReport
from mint_jax.fleet.view import HOLD_S, FleetEngine, FleetView
from tests.configs import load

ID = "e1.0123456789abcdef0123456789abcdef"
OTHER = "e0.0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("path", "body", "engine"),
    [
        ("/api/v1/optim_step", {"model_id": f"{ID}:train:0"}, "e1"),
        ("/api/v1/retrieve_future", {"request_id": f"a-{ID}"}, "e1"),
        ("/api/v1/cancel_future", {"request_ids": [f"a-{ID}"]}, "e1"),
        ("/api/v1/retrieve_futures", {"target": {"sampling_session_id": f"{ID}:sample:0"}}, "e1"),
        (f"/api/v1/training_runs/{ID}:train:0/checkpoints", {}, "e1"),
        (f"/v1/responses/resp_{ID}", {}, "e1"),
        ("/v1/responses", {"previous_response_id": f"resp_{ID}", "input": "e2.f"}, "e1"),
        # the session decides where its sampler is, not the checkpoint, which may be elsewhere
        ("/x", {"session_id": OTHER, "model_path": f"tinker://{ID}:train:0/weights/a"}, "e0"),
        ("/x", {"session_id": OTHER, "source_path": f"tinker://{ID}:train:0/weights/a"}, "e1"),
        ("/x", {"user_metadata": {"model_id": f"{ID}:train:0"}}, None),
        ("/x", {"prompt": f"{ID} e1.5"}, None),
        ("/x", [ID], None),
        ("/api/v1/create_session", {}, None),
    ],
)
def test_a_request_goes_to_the_engine_whose_ids_it_has(path, body, engine):
    assert places.named(path, json.dumps(body).encode(), True) == engine


@pytest.mark.parametrize("number", [0, 10, 10**3, 10**5])
@pytest.mark.parametrize("fill", [b"", b"\x00" * (1 << 17)], ids=["short", "long"])
def test_protobuf_bodies_name_their_model(fill, number):
    """Whatever byte the length of the model's id is: a dot or a digit, too."""
    model = f"{ID}:train:{number}".encode()
    body = b"\x0a" + bytes([len(model)]) + model + fill
    assert places.named("/api/v1/forward_backward", body, False) == "e1"
    assert places.named("/api/v1/forward_backward", fill, False) is None
    assert places.named("/x", b"no json", True) is None


def test_lists_are_merged_by_time_and_cut_to_the_page():
    def rows(*times):
        found = [{"time": f"2026-11-{t:02}"} for t in times]
        return {"checkpoints": found, "cursor": {"total_count": len(times) + 5}}

    merged = places.LISTS["/api/v1/checkpoints"]([rows(9, 4, 1), rows(7, 5)], 2, 1)
    assert [one["time"][-2:] for one in merged["checkpoints"]] == ["07", "05"]
    assert merged["cursor"] == {"offset": 1, "limit": 2, "total_count": 15}

    def costs(**seconds):
        found = [{"policy": name, "seconds": s, "tokens": 2} for name, s in seconds.items()]
        return {"costs": found, "has_more": False}

    merged = places.LISTS["/admin/costs"]([costs(a=1.0, b=2.5), costs(a=4.0)], 1, 0)
    assert merged == {"costs": [{"policy": "a", "seconds": 5.0, "tokens": 4}], "has_more": True}


def test_more_demand_loads_a_revision_on_more_homes_which_count_once_they_have_it(monkeypatch):
    now, loaded = [1000.0], []
    monkeypatch.setattr(view.time, "monotonic", lambda: now[0])
    names = tuple(f"e{i}" for i in range(4))

    def engine(name):
        one = FleetEngine(name, None, lambda digest: loaded.append((name, digest)), None)  # type: ignore[arg-type]
        one.take(EngineReport(), now[0])
        return one

    fleet = FleetView([engine(name) for name in names])
    homes = homes_of("d", names, 4)

    def report(*having):
        now[0] += 0.01
        for name, one in fleet.members.items():
            slots = frozenset({"d"}) if name in having else frozenset[str]()
            one.take(EngineReport(serving=True, rows=2, slots=slots, places=8), now[0])

    report(homes[0])
    first = fleet.members[homes[0]]
    assert {one.reason for one in fleet.choices("d", 0)} <= {"resident", "cold", "spill"}
    assert loaded == []
    with fleet.sending(first, "d"), fleet.sending(first, "d"), fleet.sending(first, "d"):
        chosen = [*fleet.choices("d", 1)]
        assert loaded == [(homes[1], "d")], "the second home warms up, once"
        list(fleet.choices("d", 2))
        assert len(loaded) == 1
        report(*homes[:2])
        chosen = [*fleet.choices("d", 3)]
    assert [one.reason for one in chosen].count("resident") == 2
    report(*homes[:1])
    list(fleet.choices("d", 4))
    assert len(loaded) == 2, "demand is remembered for a while"
    now[0] += HOLD_S + 1
    fleet._warming.clear()
    list(fleet.choices("d", 5))
    list(fleet.choices("d", 6))
    assert len(loaded) == 2, "and then forgotten"
    assert not fleet._wanted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["--config.engines=0"], "engines"),
        (["--config.engine_host=0.0.0.0"], "engine_host is '0.0.0.0' without keys"),
        (["--config.engine_host=10.0.0.1"], "engine_host"),
        (["--config.gpus=1", "--config.tpus=4"], "gpus is 1 and tpus 4"),
        (["--config.precompile=only"], "precompile is 'only'"),
        (["--config.slots=0"], "slots"),
    ],
)
def test_settings_that_no_fleet_can_have_are_refused_before_ray_starts(changes, reason):
    with pytest.raises(UserError, match=reason):
        load("configs/fleet.py:ci", *changes).preflight()
