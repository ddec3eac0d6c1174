"""A server that starts: its port is open first, requests wait for their own programs alone, and its
loop compiles nothing.
"""

import asyncio
import dataclasses
import threading

import httpx
import jax
import numpy as np
import pytest
from tinker import types

from mint_jax.compiling import EVENT, Programs
from mint_jax.rollout.request import Request
from mint_jax.service import server as server_lib
from mint_jax.service.starting import Starting
from mint_jax.train.blocks import BlockShape
from mint_jax.train.state import OptimizerConfig
from tests.service.conftest import until
from tests.service.sites import SIZES, Site, adam, datum_of
from tests.train.live_test import random_data

WAIT_S = 120.0
HOLDS = {"training": threading.Event(), "rest": threading.Event()}


class Held(Programs):
    """Compiles what training needs first, and then the rest, when it is let."""

    def __init__(self, todo, *options):
        super().__init__([self._held(program) for program in todo], *options)

    def _held(self, program):
        def build():
            assert HOLDS["rest" if program.urgency else "training"].wait(WAIT_S)
            program.build()

        is_first = program.urgency == 0 and program.key[0] not in ("update", "step")
        return program if is_first else program._replace(build=build)


@pytest.fixture
def compiled():
    """Names of threads that compiled something."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int):
        if event == EVENT:
            seen.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_requests_wait_for_their_own_programs_alone_and_the_loop_compiles_nothing(
    rng, tiny_base, tmp_path, compiled, monkeypatch
):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setattr(server_lib, "Programs", Held)
    for hold in HOLDS.values():
        hold.clear()
    sizes = dataclasses.replace(SIZES, shapes=[BlockShape(1, 1, 64)], max_rows=16)
    site = Site(tiny_base(), tmp_path, sizes, beside=True)
    try:
        ready = lambda: httpx.get(f"{site.url}/ready")  # noqa: E731
        prompt = types.ModelInput.from_ints([5, 6, 7])
        sampler = site.client().create_sampling_client(base_model=site.server.name).result()
        drawn = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result(WAIT_S)
        assert len(drawn.sequences[0].tokens) == 4
        assert ready().status_code == 503
        told = ready().json()
        assert (told["samples"], told["trains"]) == (True, False)
        assert 3 <= told["programs_ready"] < told["programs"]
        assert "programs are ready" in told["status"]

        trainer = site.trainer()
        data = [datum_of(d) for d in random_data(rng, "cross_entropy")]
        forward = trainer.forward_backward(data, "cross_entropy")
        HOLDS["training"].set()
        assert np.isfinite(forward.result(WAIT_S).metrics["loss:sum"])
        trainer.optim_step(adam(OptimizerConfig(1e-3))).result(WAIT_S)
        until(lambda: ready().json()["trains"])
        assert ready().status_code == 503

        scored = trainer.save_weights_and_get_sampling_client().result().compute_logprobs(prompt)
        until(site.server.engine.in_flight)
        # the program that scores is the last of all, unless somebody waits for it
        HOLDS["rest"].set()
        assert len(scored.result(WAIT_S)) == 3
        assert site.server.programs is not None
        assert site.server.programs.wait(WAIT_S)
        assert (ready().status_code, ready().json()["status"]) == (200, "ready")

        prompts = [tuple(rng.integers(3, 97, 5).tolist()) for _ in range(12)]
        for stream in [site.server.submit(Request(p, max_tokens=6, tenant="a")) for p in prompts]:
            stream.result()
        trainer.forward(data, "cross_entropy").result(WAIT_S)
        assert "compiler" in compiled, "else nobody listened"
        assert "engine" not in compiled
    finally:
        for hold in HOLDS.values():
            hold.set()
        site.close()


def ask(app, method, path, body=b""):
    """Status, headers and body of one answer."""
    sent, left = [], [{"type": "http.request", "body": body}]

    async def receive():
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def test_before_there_is_a_server_the_port_says_what_is_missing():
    starting = Starting()
    starting.doing = "loading tiny-random"
    assert ask(starting, "GET", "/health")[0] == 200
    status, _, body = ask(starting, "GET", "/ready")
    assert (status, b"loading tiny-random" in body) == (503, True)
    for path, shape in (("/v1/completions", b'"error"'), ("/api/v1/create_session", b'"detail"')):
        status, headers, body = ask(starting, "POST", path, b"{}")
        assert (status, headers[b"retry-after"]) == (503, b"2")
        assert shape in body
        assert b"loading tiny-random" in body

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    ended = []
    starting.end_waits()
    starting.begin(app, lambda: ended.append(True))
    assert ask(starting, "GET", "/ready")[0] == 204
    starting.end_waits()
    assert ended == [True]
