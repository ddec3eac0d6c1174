"""Sessions that move, on Ray: a machine is lost that nothing replaces, and a fleet becomes smaller.
What is moved, decided by reports alone.
"""

import contextlib
import time
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from benchmarks.service_client import Served
from mint_jax.fleet.engine import EngineReport
from mint_jax.fleet.homes import HomeMove, homes_in, moves

TOKENS = [5, 6, 7, 8, 9, 10]
INPUTS = {"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(5, np.float32)}
DATUM = types.Datum(types.ModelInput.from_ints(TOKENS[:-1]), INPUTS)
STEPS = 4


def up(*homes: str, policies: int = 0) -> EngineReport:
    return EngineReport(serving=True, homes=homes, policies=policies)


@pytest.mark.parametrize(
    ("homes", "reports", "gone", "expected"),
    [
        ({"e0", "e1"}, {"e0": up("e0"), "e1": up("e1")}, {}, []),
        # gone for too long, or not: the engine with the fewest policies
        ({"e0", "e1"}, {"e0": EngineReport(), "e1": up("e1")}, {}, []),
        ({"e0", "e1"}, {"e0": EngineReport(), "e1": up("e1")}, {"e0": 9}, [("e0", "e1", True)]),
        (
            {"e0", "e1", "e2"},
            {"e0": EngineReport(), "e1": up("e1", policies=2), "e2": up("e2")},
            {"e0": 9},
            [("e0", "e2", True)],
        ),
        # of a larger fleet: divided among those that are left
        (
            {"e0", "e1", "e2", "e3"},
            {"e0": up("e0"), "e1": up("e1")},
            {},
            [("e2", "e0", True), ("e3", "e1", True)],
        ),
        # it is back, and waits for its folder
        (
            {"e0", "e1"},
            {"e0": EngineReport(waits=True), "e1": up("e1", "e0")},
            {},
            [("e0", "e1", False)],
        ),
        # it is back, and loads the base
        ({"e0", "e1"}, {"e0": EngineReport(), "e1": up("e1", "e0")}, {}, []),
        # nobody is left
        ({"e0", "e1"}, {"e0": EngineReport(), "e1": EngineReport()}, {"e0": 9, "e1": 9}, []),
        # an engine that never had a session has nothing to move
        (set(), {"e0": EngineReport(), "e1": up("e1")}, {"e0": 9}, []),
    ],
)
def test_what_moves_follows_from_the_reports(homes, reports, gone, expected):
    assert moves(homes, reports, gone) == [HomeMove(*one) for one in expected]


def test_only_folders_of_engines_are_homes(tmp_path):
    for name in ("e0", "e12", "e0.old", "x", "e00000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "server.db").touch()
    (tmp_path / "e3").mkdir()
    assert homes_in(tmp_path) == {"e0", "e12"}


class Trained:
    """A policy that the official client trains, of a session at one engine."""

    def __init__(self, url: str):
        client = tinker.ServiceClient(base_url=url, api_key="tml-x")
        self.trainer = client.create_lora_training_client("tiny-random", 8, seed=3).result()
        self.engine = self.trainer.model_id.partition(".")[0]

    def steps(self, count: int = STEPS) -> list[float]:
        losses = []
        for _ in range(count):
            forward = self.trainer.forward_backward([DATUM], "cross_entropy")
            self.trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
            losses.append(forward.result().metrics["loss:sum"])
        return losses


def guests(url: str) -> dict[str, list[str]]:
    """The engines that are up, and whose sessions each serves besides its own."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            found = httpx.get(f"{url}/debug/state", timeout=300).raise_for_status().json()
            up = {name: one for name, one in found["engines"].items() if one["up"]}
            return {name: one["state"]["guests"] for name, one in up.items()}
        time.sleep(0.2)


def started(workdir, environment, **options) -> Served:
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TINKER_TELEMETRY": "0"} | environment
    options = {"port": 0, "move_after_s": 2} | options
    return Served("mint_jax.launch", "configs/fleet.py:ci", workdir, options, environment)


def both(url: str) -> dict[str, Trained]:
    """A policy at each of two engines."""
    made = [Trained(url) for _ in range(2)]
    found = {one.engine: one for one in made}
    assert set(found) == {"e0", "e1"}
    return found


@pytest.mark.long
def test_sessions_of_a_lost_machine_move_and_return(tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    # one engine a machine: a lost one cannot be replaced
    node: dict[str, Any] = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 128 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    machine = cluster.add_node(**node)
    served = started(tmp_path / "fleet", {"RAY_ADDRESS": cluster.address}, engines=2, gpus=1)
    try:
        url = served.ready()
        policies = both(url)
        first = {name: one.steps() for name, one in policies.items()}
        assert first["e0"] == first["e1"]
        cluster.remove_node(machine, allow_graceful=False)
        while (left := guests(url)) and len(left) > 1:
            time.sleep(0.2)
        [stays] = left
        [lost] = policies.keys() - {stays}
        second = policies[stays].steps()
        assert policies[lost].steps() == second, "nothing is lost, nothing is done twice"
        assert guests(url) == {stays: [lost]}
        cluster.add_node(**node)
        while guests(url) != {stays: [], lost: []}:
            time.sleep(0.2)
        assert policies[lost].steps() == policies[stays].steps()
        assert served.stop()["stopped_by"] == "SIGTERM"
    finally:
        served.kill()
        cluster.shutdown()


@pytest.mark.long
def test_a_smaller_fleet_serves_all_sessions_and_a_larger_one_divides_them_again(
    tmp_path, monkeypatch
):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    # of somebody else on this machine: the fleet does not join it
    other = Cluster(initialize_head=True, head_node_args={"object_store_memory": 128 << 20})
    served = started(tmp_path / "fleet", {}, engines=2)
    try:
        policies = both(served.ready())
        losses = {name: one.steps() for name, one in policies.items()}
        paths = {name: one.trainer.save_state("s").result().path for name, one in policies.items()}
        for engines, expected in ((1, {"e0": ["e1"]}), (2, {"e0": [], "e1": []})):
            served.stop()
            served = started(tmp_path / "fleet", {}, engines=engines)
            url = served.ready()
            while guests(url) != expected:
                time.sleep(0.2)
            client = tinker.ServiceClient(base_url=url, api_key="tml-x")
            rest = client.create_rest_client()
            found = {one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints}
            assert found == {*paths.values()}
            for name, path in paths.items():
                again = client.create_training_client_from_state_with_optimizer(path)
                loss = again.result().forward([DATUM], "cross_entropy").result()
                assert loss.metrics["loss:sum"] < losses[name][-1]
        served.stop()
    finally:
        served.kill()
        other.shutdown()
