"""kill -9 of the server's process under four tenants over HTTP: they continue, nothing is lost or
done twice, and every answer stays what it was.

A tenant's round depends on seed, tenant and round alone: requests of training, now and then a state
or weights to sample, samples of what was saved, a state loaded again.
"""

import asyncio
import dataclasses
import json
import os
import random
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.postgres_server import free_port
from benchmarks.service_client import (
    Client,
    Policy,
    Sampler,
    Served,
    forward,
    forward_backward,
    optim,
)
from mint_jax.train.host_state import HostState

KILLS = int(os.environ.get("MINT_TEST_KILLS", "3"))
OPTIONS = {"snapshot_every": 3, "snapshot_s": 2.0, "max_rows": 4, "shapes": "((4, 1, 16),)"}
AWAKE_S = (0.3, 4.0)  # seconds that a server lives once it serves
START_S = (0.0, 6.0)  # seconds that each third one lives, which is killed on its way there
TENANTS, ROUNDS, VOCABULARY, PROMPT = 4, 5, 97, (5, 6, 7, 8)
FRESH_S = 200.0  # for which a result is asked for again: the server keeps it for 300 s


@dataclasses.dataclass
class Told:
    """A request, and its result in bytes; ``at`` is when it came, monotonic seconds."""

    path: str
    body: dict
    id: str
    result: bytes
    at: float

    @property
    def losses(self) -> list[float]:
        """The loss of a request that has one, and the log-probabilities of its targets."""
        if not self.path.startswith("forward"):
            return []
        told = json.loads(self.result)
        logprobs = [logp for one in told["loss_fn_outputs"] for logp in one["logprobs"]["data"]]
        return [told["metrics"]["loss:sum"], *logprobs]


class Tenant:
    """One session with one policy. ``told``: results by number of their request; ``sampled``:
    greedy tokens and log-probabilities of the prompt by path; ``checked``: answers asked for twice.
    """

    def __init__(self, client: Client, number: int, seed: int):
        self.client, self.number, self.seed = client, number, seed
        self.told: dict[int, Told] = {}
        self.sampled: dict[str, tuple[list[int], list[float]]] = {}
        self.states: list[str] = []
        self.rounds = self.checked = self.samplers = 0

    async def run(self, rounds: int | None, ended: asyncio.Event) -> None:
        """Runs some rounds; with None until ``ended`` is set, and ``ROUNDS`` at least."""
        self.session = await self.client.session()
        self.policy = Policy(self.client, self.session, 0)
        await self.policy.create("tiny-random", 5 + self.number % 4, self.number)
        while self.rounds < (rounds or ROUNDS) or (rounds is None and not ended.is_set()):
            await self.round(np.random.default_rng([self.seed, self.number, self.rounds]))
            self.rounds += 1
        await self.do([("save_weights", {"path": "last"})])

    async def do(self, requests: list) -> str:
        """Sends all, then waits for all; returns the path of the last."""
        sent = []
        for path, body in requests:
            id = await self.policy.send(path, body)
            sent.append((self.policy.sent, path, body, id))
        for number, *about in sent:
            result = await self.client.result(about[-1])
            self.told[number] = Told(*about, result, time.monotonic())
        return json.loads(self.told[self.policy.sent].result).get("path")

    async def round(self, rng: np.random.Generator) -> None:
        rows = rng.integers(3, VOCABULARY, (int(rng.integers(1, 3)), 12)).tolist()
        train = [("forward_backward", forward_backward([row])) for row in rows]
        what, name = rng.random(), {"path": f"r{self.rounds}"}
        if what < 0.2:
            train.append(("forward", forward(rows)))
        await self.do([*train, ("optim_step", optim(float(rng.uniform(1e-3, 1e-2))))])
        if 0.2 <= what < 0.35:
            self.states.append(await self.do([("save_weights", name)]))
        elif 0.35 <= what < 0.6:
            path = await self.do([("save_weights_for_sampler", name)])
            self.sampled[path] = await self.sample(path)
        elif 0.6 <= what < 0.65 and self.states:
            path = self.states[int(rng.integers(len(self.states)))]
            await self.do([("load_weights", {"path": path, "optimizer": True})])
        if self.sampled and rng.random() < 0.3:
            await self.same_sample(list(self.sampled)[int(rng.integers(len(self.sampled)))])
        await self.same_result(1 + int(rng.integers(self.policy.sent)))

    async def sample(self, path: str) -> tuple[list[int], list[float]]:
        """Samples by a sampling session of its own."""
        sampler = Sampler(self.client, self.session, self.samplers, path)
        self.samplers += 1
        await sampler.create()
        answer = await sampler.sample(PROMPT, 6, 0.0, prompt_logprobs=True)
        return answer["sequences"][0]["tokens"], answer["prompt_logprobs"][1:]

    async def same_sample(self, path: str) -> None:
        tokens, logprobs = await self.sample(path)
        assert tokens == self.sampled[path][0], path
        # the same weights; the row's company, by which sums are split, is another
        np.testing.assert_allclose(logprobs, self.sampled[path][1], atol=1e-5)
        self.checked += 1

    async def same_result(self, number: int) -> None:
        """A repeated request has its id, and its result has the same bytes."""
        told = self.told[number]
        if time.monotonic() - told.at < FRESH_S:
            assert await self.policy.send_as(number, told.path, told.body) == told.id
            assert await self.client.result(told.id) == told.result
            self.checked += 1


async def serve_all(
    port: int, seed: int, rounds: list[int] | None, ended: asyncio.Event
) -> list[Tenant]:
    """Runs all tenants at once, and checks all their answers again."""
    async with Client(f"http://127.0.0.1:{port}") as client:
        tenants = [Tenant(client, number, seed) for number in range(TENANTS)]
        async with asyncio.TaskGroup() as group:
            for tenant in tenants:
                group.create_task(tenant.run(rounds and rounds[tenant.number], ended))
        for tenant in tenants:
            for path in tenant.sampled:
                await tenant.same_sample(path)
            for number in tenant.told:
                await tenant.same_result(number)
    return tenants


def start(folder: Path, port: int) -> Served:
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    options = OPTIONS | {"port": port}
    return Served("mint_jax.launch", "configs/serve.py:ci", folder, options, environment)


def digests(folder: Path) -> dict[str, str]:
    """Returns the digests of all paths in the database."""
    try:
        with sqlite3.connect(f"file:{folder / 'server.db'}?mode=ro", uri=True) as database:
            rows = database.execute("SELECT model, kind, name, digest FROM checkpoints").fetchall()
    except sqlite3.OperationalError:  # it was killed before there was a database
        return {}
    return {f"tinker://{model}/{kind}/{name}": digest for model, kind, name, digest in rows}


async def killed_again_and_again(folder: Path, choice: random.Random, seed: int) -> list[Tenant]:
    """Returns the tenants of a server that was killed ``KILLS`` times while they continued."""
    port, ended, kept = free_port(), asyncio.Event(), {}
    served = start(folder, port)
    tenants = asyncio.create_task(serve_all(port, seed, None, ended))
    try:
        for kill in range(KILLS):
            if kill % 3 == 1:
                await asyncio.sleep(choice.uniform(*START_S))
            else:
                await asyncio.to_thread(served.ready)
                await asyncio.wait([tenants], timeout=choice.uniform(*AWAKE_S))
            served.kill()
            if tenants.done():
                tenants.result()
            found = digests(folder)
            assert kept.items() <= found.items()
            kept = found
            served = start(folder, port)
        await asyncio.to_thread(served.ready)
        ended.set()
        done = await tenants
    finally:
        tenants.cancel()
        served.kill() if not ended.is_set() else served.stop()
    assert kept.items() <= digests(folder).items()
    assert {path for one in done for path in (*one.sampled, *one.states)} <= digests(folder).keys()
    return done


async def undisturbed(folder: Path, rounds: list[int], seed: int) -> list[Tenant]:
    port = free_port()
    served = start(folder, port)
    try:
        await asyncio.to_thread(served.ready)
        return await serve_all(port, seed, rounds, asyncio.Event())
    finally:
        served.stop()


def last_state(folder: Path, tenant: Tenant) -> HostState:
    digest = digests(folder)[f"tinker://{tenant.policy.id}/weights/last"]
    path = folder / "checkpoints" / f"{digest}.safetensors"
    return HostState.from_bytes(path.read_bytes(), str(path))


@pytest.mark.long
def test_a_server_that_is_killed_goes_on_with_every_client(memory, rng):
    seed, choice = int(rng.integers(1 << 30)), random.Random(int(rng.integers(1 << 30)))
    at, whole = memory / "killed", memory / "whole"
    found = asyncio.run(killed_again_and_again(at, choice, seed))
    expected = asyncio.run(undisturbed(whole, [tenant.rounds for tenant in found], seed))
    assert found[0].client.again["connection"] >= KILLS
    for one, other in zip(found, expected, strict=True):
        assert one.checked > 0
        assert one.told.keys() == other.told.keys()
        for number, told in one.told.items():
            # float32 sums in another order: steps are shared with others than there
            losses, about = other.told[number].losses, f"request {number} of {one.number}"
            np.testing.assert_allclose(told.losses, losses, rtol=1e-5, err_msg=about)
        for (_, mine), (_, theirs) in zip(
            one.sampled.values(), other.sampled.values(), strict=True
        ):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)
        mine, theirs = last_state(at, one), last_state(whole, other)
        assert (mine.steps, mine.skipped) == (theirs.steps, theirs.skipped)
        assert set(mine.parts) == set(theirs.parts)
        for part, leaves in mine.parts.items():
            for path, leaf in leaves.items():
                atol = 1e-5 * max(1e-3, np.abs(leaf).max())
                np.testing.assert_allclose(leaf, theirs.parts[part][path], atol=atol, err_msg=path)
