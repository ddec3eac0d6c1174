"""HTTP clients of one server: more policies than training slots, more revisions than adapter slots.

The first ``policies`` clients train and save; the others sample random revisions. Times go from
sending to the result. ``wrong_revisions``: of ``checked`` responses, those of another revision,
found by scoring them again. ``most_error``: largest difference of a log-probability, nats;
``least_distance``: smallest one between two revisions. ``rss_mb_grown``: lowest memory of the last
third less that of the second, less the growth of caches.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks import timing
from benchmarks.service_client import (
    Client,
    Expired,
    Failed,
    Policy,
    Sampler,
    Served,
    forward,
    forward_backward,
    optim,
)
from mint_jax.metrics import Progress

VOCABULARY = 256  # ids that every base has
# of a round: revisions of one policy differ by far more than float32 does, and adapters stay small
# in addition to the base
LEARNING_RATE = 0.002
# nats between two scores of a token by the same weights, in float32, by two programs
TOLERANCE = 5e-3
KINDS = ("round", "save", "sample", "heartbeat")


class _Revision(NamedTuple):
    """A revision that can be sampled, by the path of its weights; ``state`` is the path of the
    training state that was saved with it, ``tokens`` were drawn greedily after the common prompt.
    """

    path: str
    state: str
    tokens: list[int]
    logprobs: list[float]


class _Session:
    """One client: its connections, its session, and a sampling session for each revision."""

    def __init__(self, load: "_Load", number: int, client: Client):
        self.load, self.number, self.client = load, number, client
        self.rng = np.random.default_rng([load.config.seed, number])
        self.policy: Any = None  # that it trains
        self.places = 0  # of policies, the first of which is its own
        self._samplers: dict[str, Sampler] = {}

    async def open(self) -> None:
        self.id = await self.client.session()

    async def sample(self, path: str, *how: Any, **options: Any) -> Any:
        """Returns a response of the revision at a path; ``how`` as ``Sampler.sample`` has it."""
        if path not in self._samplers:
            sampler = Sampler(self.client, self.id, len(self._samplers), path)
            await sampler.create()
            self._samplers[path] = sampler
        return await self._samplers[path].sample(*how, **options)

    async def greedy(self, path: str) -> Any:
        """Returns the tokens of a revision after the common prompt, and their scores."""
        found = await self.sample(path, self.load.prompt, self.load.config.new_tokens, 0.0)
        return found["sequences"][0]

    def row(self, count: int) -> list[int]:
        return self.rng.integers(1, VOCABULARY, count).tolist()

    # -- what it does until the load ends

    async def turns(self) -> AsyncIterator[int]:
        """Counts from 1 on, after a pause each time."""
        for count in itertools.count(1):
            await asyncio.sleep(self.rng.uniform(0, 2 * self.load.config.pause_s))
            if self.load.over:
                return
            yield count

    async def heartbeats(self) -> None:
        every, body = self.load.config.heartbeat_s, {"session_id": self.id}
        await asyncio.sleep(self.rng.uniform(0, every))  # clients do not begin together
        while not self.load.over:
            await self.load.timed("heartbeat", self.client.post("session_heartbeat", body))
            await asyncio.sleep(min(every, max(0.0, self.load.left_s)))

    async def sampling(self) -> None:
        c, load = self.load.config, self.load
        async for count in self.turns():
            revision = load.revisions[int(self.rng.integers(len(load.revisions)))]
            prompt = self.row(c.prompt)
            sampled = self.sample(revision.path, prompt, c.new_tokens, 1.0)
            answer = await load.timed("sample", sampled)
            if answer is not None and count % c.check_every == 0:
                wrong = self._is_wrong(revision, prompt, answer["sequences"][0])
                if (found := await load.timed("check", wrong)) is not None:
                    load.checked += 1
                    load.wrong += found

    async def _is_wrong(self, revision: _Revision, prompt: list[int], answer: Any) -> bool:
        """Returns true if a response is not from its revision: by a score of the sampler, one of
        the trainer if its training state is kept, and the greedy tokens.
        """
        whole, load = prompt + answer["tokens"], self.load
        scored = await self.sample(revision.path, whole, 1, 0.0, prompt_logprobs=True)
        scores = [scored["prompt_logprobs"][len(prompt) :]]
        if revision.state:
            found = await self._scored_in_training(revision, whole)
            scores.append(found[len(prompt) - 1 :])
            load.checked_in_training += 1
        error = max(float(np.abs(np.subtract(one, answer["logprobs"])).max()) for one in scores)
        load.most_error = max(load.most_error, error)
        greedy = await self.greedy(revision.path)
        return error > TOLERANCE or greedy["tokens"] != revision.tokens

    async def _scored_in_training(self, revision: _Revision, tokens: list[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, by a policy that is made from the
        revision's training state, and ended.
        """
        self.places += 1
        policy = Policy(self.client, self.id, self.places)
        await policy.load(revision.state)
        answer = await policy.do("forward", forward([tokens]))
        await self.client.post("unload_model", {"model_id": policy.id})
        return answer["loss_fn_outputs"][0]["logprobs"]["data"]

    async def training(self) -> None:
        load = self.load
        async for count in self.turns():
            found = await load.timed("round", self.round())
            if found is not None and count % load.config.save_every == 0:
                found = await load.timed("save", self.save(f"load-{count}", False))
            if found is None:
                return  # its next request would wait for the one that was refused

    async def round(self) -> list[bytes]:
        c = self.load.config
        rows = [self.row(c.tokens + 1) for _ in range(c.sequences)]
        asked = {"forward_backward": forward_backward(rows), "optim_step": optim(LEARNING_RATE)}
        ids = [await self.policy.send(path, body) for path, body in asked.items()]
        return [await self.client.result(id) for id in ids]

    async def save(self, name: str, state: bool) -> _Revision:
        """A revision of a policy, which the others sample from now on."""
        path = (await self.policy.do("save_weights_for_sampler", {"path": name}))["path"]
        saved = (await self.policy.do("save_weights", {"path": name}))["path"] if state else ""
        found = await self.greedy(path)
        revision = _Revision(path, saved, found["tokens"], found["logprobs"])
        self.load.revisions.append(revision)
        return revision

    async def prepare(self, base: str, count: int) -> None:
        """A new policy, and its share of the revisions, the last with its training state."""
        await self.policy.create(base, self.load.config.rank, self.number)
        for k in range(count):
            await self.round()
            await self.save(f"made-{k}", k == count - 1)
            self.load.progress.update(len(self.load.revisions))


class _Load:
    """All clients of one server, and what they found."""

    def __init__(self, config: Any, clients: Sequence[Client]):
        self.config, self.clients = config, clients
        rng = np.random.default_rng(config.seed)
        self.prompt = rng.integers(1, VOCABULARY, config.prompt).tolist()
        self.revisions: list[_Revision] = []
        self.seconds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "check")}
        self.errors: list[str] = []
        self.checked = self.checked_in_training = self.wrong = 0
        self.most_error = 0.0
        self.rss: list[tuple[float, int, int]] = []  # seconds, resident bytes, bytes of caches
        self.progress = Progress("revisions", config.revisions)

    @property
    def left_s(self) -> float:
        return self._until - time.perf_counter()

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    async def timed(self, kind: str, call: Awaitable[Any]) -> Any:
        """Returns the result of a request; None if it failed."""
        began = time.perf_counter()
        try:
            found = await call
        except (Failed, Expired, TimeoutError, httpx.HTTPError) as error:
            self.errors.append(f"{kind}: {error}")
            return None
        self.seconds[kind].append(time.perf_counter() - began)
        return found

    async def run(self, served: Served) -> dict[str, Any]:
        """Makes the revisions, then loads the server; what was found."""
        c = self.config
        offered = json.loads(await self.clients[0].get("/api/v1/get_server_capabilities"))
        base = offered["supported_models"][0]["model_name"]
        sessions = [_Session(self, number, client) for number, client in enumerate(self.clients)]
        for session in sessions:
            await session.open()
            if session.number < c.policies:
                session.policy = Policy(session.client, session.id, 0)
        shares = [len(share) for share in np.array_split(np.arange(c.revisions), c.policies)]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session, share in zip(sessions, shares):
                group.create_task(session.prepare(base, share))
        made_s = time.perf_counter() - began
        least = least_distance([revision.logprobs for revision in self.revisions])
        began, self._until = time.perf_counter(), time.perf_counter() + c.seconds
        for client in self.clients:
            client.again.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(served))
            for session in sessions:
                group.create_task(session.heartbeats())
                group.create_task(session.training() if session.policy else session.sampling())
        took = time.perf_counter() - began
        return {
            **self._requests(took),
            "wrong_revisions": self.wrong,
            "checked": self.checked,
            "checked_in_training": self.checked_in_training,
            "most_error": float(f"{self.most_error:.3g}"),
            "least_distance": float(f"{least:.3g}"),
            **self._memory(),
            "made_s": round(made_s, 1),
            "revisions_after": len(self.revisions),
        }

    async def _watch(self, served: Served) -> None:
        """Reads the server's memory each second, and ten times how much of it is in caches."""
        progress = Progress("seconds of load", int(self.config.seconds))
        began, asked_at, caches = time.perf_counter(), 0.0, 0
        while not self.over:
            at = time.perf_counter() - began
            if at >= asked_at:
                state = json.loads(await self.clients[0].get("/debug/state"))
                asked_at = at + self.config.seconds / 10
                caches = state["residency"]["host"]["bytes"] + state["training"]["host_bytes"]
            self.rss.append((at, served.rss_bytes(), caches))
            counts = ", ".join(
                f"{len(times)} {kind}s" for kind, times in self.seconds.items() if kind in KINDS
            )
            progress.update(
                int(time.perf_counter() - began),
                f"{counts}, {len(self.errors)} errors, {self.rss[-1][1] / 1e6:.0f} MB",
            )
            await asyncio.sleep(1.0)

    def _requests(self, took: float) -> dict[str, Any]:
        out: dict[str, Any] = {"load_s": round(took, 1)}
        out |= {"errors": len(self.errors), "first_errors": self.errors[:3]}
        out["again"] = dict(sum((client.again for client in self.clients), collections.Counter()))
        for kind in KINDS:
            found = timing.percentiles(self.seconds[kind])
            out |= {f"{kind}_{name}": figure for name, figure in found.items()}
            out[f"{kind}s"] = len(self.seconds[kind])
        return out

    def _memory(self) -> dict[str, float]:
        """Megabytes when the load began and ended, and their growth in its last third."""
        grown, caches = growth(self.rss)
        found = {"rss_mb_start": self.rss[0][1], "rss_mb_end": self.rss[-1][1]}
        found |= {"rss_mb_grown": grown, "caches_mb_grown": caches}
        return {name: round(float(size) / 1e6, 1) for name, size in found.items()}


def growth(read: Sequence[tuple[float, int, int]]) -> tuple[int, int]:
    """Bytes by which memory beyond the caches, and the caches, grew from the second third of a load
    to the last, by the lowest of each third. ``read`` has seconds, resident bytes and bytes of
    caches.
    """
    at, rss, caches = np.array(read).T
    ends = at[-1] * np.arange(1, 4) / 3
    thirds = [np.flatnonzero((at >= low) & (at <= high)) for low, high in pairwise(ends)]
    if not all(map(len, thirds)):
        return 0, 0
    before, after = (third[rss[third].argmin()] for third in thirds)
    kept = int(caches[after] - caches[before])
    return int(rss[after] - rss[before]) - max(0, kept), kept


def least_distance(rows: list[list[float]]) -> float:
    """The smallest distance of any two rows, by their entries that differ most."""
    pairs = itertools.combinations(np.array(rows), 2)
    return min((float(np.abs(a - b).max()) for a, b in pairs), default=0.0)


async def _loaded(config: Any, served: Served) -> dict[str, Any]:
    url = await asyncio.to_thread(served.ready)
    async with contextlib.AsyncExitStack() as opened:
        # a pool of connections for each: httpcore looks at all of a pool's at each request
        clients = [await opened.enter_async_context(Client(url)) for _ in range(config.clients)]
        return await _Load(config, clients).run(served)


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. What the server made is removed."""
    folder = workdir / "server"
    shutil.rmtree(folder, ignore_errors=True)
    options = {"base": config.base, "dtype": config.dtype, "port": 0, **config.server}
    served = Served(config.program, "configs/serve.py", folder, options)
    try:
        found = asyncio.run(_loaded(config, served))
        ended = served.stop()
    finally:
        served.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if found["rss_mb_grown"] > config.growth_mb:
        raise RuntimeError(
            f"the server's memory grew by {found['rss_mb_grown']} MB beyond its caches in the last"
            f" third of the load; expected {config.growth_mb} MB at most"
        )
    return {
        **{name: config[name] for name in ("base", "dtype", "clients", "policies", "revisions")},
        "cores": os.cpu_count(),
        "slots": config.server.slots,
        "adapters": config.server.adapters,
        **found,
        "tokens_sampled": ended["tokens_sampled"],
        "training_steps": ended["training_steps"],
    }
