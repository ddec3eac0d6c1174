"""Tenants of a server over HTTP that do the same whatever happens to it, and note all that they are
told.

A tenant's round is decided by seed, tenant and round alone: requests of training, now and then a
state or weights to sample, samples of what was saved, a state loaded again. Names of what is saved
are the rounds'.
"""

import asyncio
import dataclasses
import json
import time

import numpy as np

from benchmarks.service_client import (
    Client,
    Expired,
    Policy,
    Sampler,
    forward,
    forward_backward,
    optim,
)

TENANTS, VOCABULARY, PROMPT = 8, 97, (5, 6, 7, 8)
ROUNDS = 5
# for which a result is asked for again: the server keeps it for 300 behind its delivery
FRESH_S = 200.0


@dataclasses.dataclass
class Told:
    """A request's result, in bytes.

    Attributes:
        path, body: what was asked.
        at: when it was told, monotonic seconds.
    """

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
        return [
            told["metrics"]["loss:sum"],
            *(logp for one in told["loss_fn_outputs"] for logp in one["logprobs"]["data"]),
        ]


@dataclasses.dataclass
class Sampled:
    """What a path gave when it was new: greedy tokens, and log-probabilities of the prompt."""

    tokens: list[int]
    prompt_logprobs: list[float]


class Tenant:
    """One session, one policy.

    Attributes:
        told: by number of its requests.
        sampled: by path.
        states: paths of training states.
        rounds: how many are done.
        checked: results asked for a second time, and paths sampled again.
    """

    def __init__(self, client: Client, number: int, seed: int):
        self.client, self.number, self.seed = client, number, seed
        self.told: dict[int, Told] = {}
        self.sampled: dict[str, Sampled] = {}
        self.states: list[str] = []
        self.rounds = self.checked = self.samplers = 0

    async def run(self, rounds: int | None, ended: asyncio.Event) -> None:
        """So many rounds; or, with None, until ``ended`` is set, and ``ROUNDS`` at least."""
        self.session = await self.client.session()
        self.policy = Policy(self.client, self.session, 0)
        await self.policy.create("tiny-random", 5 + self.number % 4, self.number)
        while self.rounds < (rounds or ROUNDS) or (rounds is None and not ended.is_set()):
            await self.round(np.random.default_rng([self.seed, self.number, self.rounds]))
            self.rounds += 1
        await self.do([("save_weights", {"path": "last"})])

    async def do(self, requests: list) -> list[bytes]:
        """Sends all, then waits for all; what they gave."""
        sent = []
        for path, body in requests:
            id = await self.policy.send(path, body)
            sent.append((self.policy.sent, id, path, body))
        for number, id, path, body in sent:
            self.told[number] = Told(path, body, id, await self.client.result(id), time.monotonic())
        return [self.told[number].result for number, *_ in sent]

    async def round(self, rng: np.random.Generator) -> None:
        rows = rng.integers(3, VOCABULARY, (int(rng.integers(1, 3)), 12)).tolist()
        train = [("forward_backward", forward_backward([row])) for row in rows]
        what, name = rng.random(), f"r{self.rounds}"
        if what < 0.2:
            train.append(("forward", forward(rows)))
        await self.do([*train, ("optim_step", optim(float(rng.uniform(1e-3, 1e-2))))])
        if 0.2 <= what < 0.35:
            [result] = await self.do([("save_weights", {"path": name})])
            self.states.append(json.loads(result)["path"])
        elif 0.35 <= what < 0.6:
            [result] = await self.do([("save_weights_for_sampler", {"path": name})])
            path = json.loads(result)["path"]
            self.sampled[path] = await self.sample(path)
        elif 0.6 <= what < 0.65 and self.states:
            path = self.states[int(rng.integers(len(self.states)))]
            await self.do([("load_weights", {"path": path, "optimizer": True})])
        if self.sampled and rng.random() < 0.3:
            await self.same_sample(list(self.sampled)[int(rng.integers(len(self.sampled)))])
        await self.same_result(1 + int(rng.integers(self.policy.sent)))

    async def sample(self, path: str) -> Sampled:
        """By a sampling session of its own."""
        sampler = Sampler(self.client, self.session, self.samplers, path)
        self.samplers += 1
        await sampler.create()
        answer = await sampler.sample(PROMPT, 6, 0.0, prompt_logprobs=True)
        return Sampled(answer["sequences"][0]["tokens"], answer["prompt_logprobs"][1:])

    async def same_sample(self, path: str) -> None:
        """A path gives what it gave."""
        found = await self.sample(path)
        assert found.tokens == self.sampled[path].tokens, path
        # the same weights; the row's company, by which sums are split, is another
        np.testing.assert_allclose(
            found.prompt_logprobs, self.sampled[path].prompt_logprobs, atol=1e-5
        )
        self.checked += 1

    async def same_result(self, number: int) -> None:
        """A request that is sent again has its id, and its result is told in the same bytes."""
        told = self.told[number]
        if time.monotonic() - told.at > FRESH_S:
            return
        try:
            assert await self.policy.send_as(number, told.path, told.body) == told.id
            assert await self.client.result(told.id) == told.result
        except Expired:
            raise AssertionError(
                f"request {number} of {self.policy.id} was told {time.monotonic() - told.at:.0f}"
                " s ago"
            ) from None
        self.checked += 1


async def serve_all(
    url: str, seed: int, rounds: list[int] | None, ended: asyncio.Event
) -> list[Tenant]:
    """All tenants beside each other, until all are done."""
    async with Client(url) as client:
        tenants = [Tenant(client, number, seed) for number in range(TENANTS)]
        async with asyncio.TaskGroup() as group:
            for tenant in tenants:
                group.create_task(
                    tenant.run(None if rounds is None else rounds[tenant.number], ended)
                )
        for tenant in tenants:
            for path in tenant.sampled:
                await tenant.same_sample(path)
            for number in tenant.told:
                await tenant.same_result(number)
    return tenants
