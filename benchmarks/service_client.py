"""A server in its own process, and light HTTP clients that send Tinker's requests as JSON.

A client retries as the official one does: without a connection, at 408, 409, 429 and from 500 on. A
training request keeps its number; a sample that a restart lost (410) gets a new one.
"""

import asyncio
import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

WAIT_S = 600.0
PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
POLL_S = 45.0  # the official client's patience with one long poll


class Served:
    """The job ``serve`` in a process of its own; ``listening`` and then ``ready`` wait for it. Its
    stderr goes to ``<workdir>.log``.
    """

    def __init__(
        self,
        program: str,
        config: str,
        workdir: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ):
        workdir.parent.mkdir(parents=True, exist_ok=True)
        self._workdir = workdir
        self._log = workdir.with_name(f"{workdir.name}.log")
        settings = [f"--config.{name}={value}" for name, value in options.items()]
        arguments = [f"--config={config}", f"--workdir={workdir}", *settings]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, *arguments],
                env=os.environ | (environment or {}),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def listening(self) -> str:
        """Waits until the port is open; returns the server's URL."""
        return self._wait_for("listening")

    def ready(self) -> str:
        """Waits until everything is compiled; returns the server's URL."""
        return self._wait_for("ready")

    def _wait_for(self, word: str) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if word in (event := json.loads(line)):
                return event["url"]
        raise RuntimeError(f"the server ended with {self.process.wait()}: {self.log()}")

    def log(self) -> str:
        """The end of its stderr."""
        return self._log.read_text()[-3000:]

    def rss_bytes(self) -> int:
        """Resident memory, bytes."""
        return psutil.Process(self.process.pid).memory_info().rss

    def kill(self) -> None:
        """kill -9; nothing where it has ended."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()

    def stop(self) -> dict[str, Any]:
        """SIGTERM; the result that it leaves."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=WAIT_S)
        if self.process.returncode:
            raise RuntimeError(f"the server ended with {self.process.returncode}: {self.log()}")
        return json.loads((self._workdir / "result.json").read_text())


class Failed(Exception):
    """A request that was refused or failed for good."""


class Expired(Exception):
    """The server keeps nothing of this id (410)."""


class Client:
    """Requests to one server, which may come and go. ``again`` counts retries by status, or
    ``connection``.
    """

    def __init__(self, url: str):
        # no TLS: certificates would be read for nothing
        how: dict[str, Any] = {"base_url": url, "timeout": POLL_S, "trust_env": False}
        how |= {"verify": False, "headers": {"x-api-key": "tml-bench"}}
        self._http = httpx.AsyncClient(**how, limits=httpx.Limits())
        self.again: collections.Counter[str] = collections.Counter()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> str:
        """A page's text."""
        return (await self._http.get(path)).raise_for_status().text

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The body of an answer.

        Raises:
            Expired, Failed: 410; another status below 500 that is no reason to ask again.
            TimeoutError: ``WAIT_S`` are over.
        """
        give_up, pause = time.monotonic() + WAIT_S, PAUSE_S
        while time.monotonic() < give_up:
            try:
                answer = await self._http.post(f"/api/v1/{path}", json=body)
            except httpx.TransportError:
                why = "connection"
            else:
                if answer.status_code < 300:
                    return answer.content
                if answer.status_code == 410:
                    raise Expired(answer.text)
                if answer.status_code not in (408, 409, 429) and answer.status_code < 500:
                    raise Failed(f"{path}: {answer.status_code} {answer.text[:500]}")
                why = str(answer.status_code)
            self.again[why] += 1
            if why != "408":  # a poll that ended too soon
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        raise TimeoutError(f"{path} has no answer within {WAIT_S:.0f} s")

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """``post``, and the JSON that it gives."""
        return json.loads(await self.post(path, body))

    async def result(self, id: str) -> bytes:
        """Returns the result of a future, as bytes of its response.

        Raises:
            Expired: it is not kept.
            Failed: it failed.
        """
        body = await self.post("retrieve_future", {"request_id": id, "allow_metadata_only": False})
        if body.startswith(b'{"error"'):
            raise Failed(f"{id}: {body.decode()}")
        return body

    async def session(self) -> str:
        """The id of a new session."""
        body = {"tags": [], "sdk_version": "bench", "type": "create_session"}
        return (await self.ask("create_session", body))["session_id"]


class Policy:
    """A model in training, whose requests are numbered."""

    def __init__(self, client: Client, session: str, place: int):
        self.client, self.id, self.sent = client, f"{session}:train:{place}", 0
        self._place = {"session_id": session, "model_seq_id": place}

    async def create(self, base: str, rank: int, seed: int) -> None:
        lora = {"rank": rank, "seed": seed}
        await self._made("create_model", base_model=base, lora_config=lora)

    async def load(self, path: str) -> None:
        """Creates it from a training state."""
        await self._made("load_weights", path=path, optimizer=True)

    async def _made(self, verb: str, **body: Any) -> None:
        await self.client.result((await self.client.ask(verb, self._place | body))["request_id"])

    async def send(self, path: str, body: Mapping[str, Any]) -> str:
        """The id of its next request."""
        self.sent += 1
        return await self.send_as(self.sent, path, body)

    async def send_as(self, number: int, path: str, body: Mapping[str, Any]) -> str:
        """The id of the request of this number."""
        own = {"model_id": self.id, "seq_id": number}
        return (await self.client.ask(path, own | dict(body)))["request_id"]

    async def do(self, path: str, body: Mapping[str, Any]) -> Any:
        """Sends the next request; returns its result."""
        return json.loads(await self.client.result(await self.send(path, body)))


def forward_backward(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Cross-entropy of every token but the first, of each row."""
    data = []
    for row in rows:
        targets = list(row[1:])
        kinds = {"target_tokens": (targets, "int64"), "weights": ([1.0] * len(targets), "float32")}
        inputs = {
            name: {"data": values, "dtype": dtype, "shape": [len(values)]}
            for name, (values, dtype) in kinds.items()
        }
        data.append({"model_input": _input(row[:-1]), "loss_fn_inputs": inputs})
    return {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}


def _input(tokens: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def forward(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The same without gradients."""
    return {"forward_input": forward_backward(rows)["forward_backward_input"]}


def optim(learning_rate: float) -> dict[str, Any]:
    """An update; ``eps`` is large enough that a gradient's last bits stay there."""
    return {"adam_params": {"learning_rate": learning_rate, "eps": 1e-5}}


class Sampler:
    """A sampling session over one path."""

    def __init__(self, client: Client, session: str, place: int, path: str):
        self.client, self.path, self.id, self.sent = client, path, f"{session}:sample:{place}", 0
        self._made = {"session_id": session, "sampling_session_seq_id": place, "model_path": path}

    async def create(self) -> None:
        await self.client.post("create_sampling_session", self._made)

    async def sample(
        self, prompt: Sequence[int], max_tokens: int, temperature: float, **options: Any
    ) -> Any:
        """The answer to the session's next request; a request that the
        server lost is sent again.
        """
        number, self.sent = self.sent, self.sent + 1
        how = {"max_tokens": max_tokens, "temperature": temperature}
        body = {
            "sampling_session_id": self.id,
            "seq_id": number,
            "num_samples": 1,
            "prompt": _input(prompt),
            "sampling_params": how | {"seed": number, "stop": []},
            **options,
        }
        while True:
            id = (await self.client.ask("asample", body))["request_id"]
            try:
                return json.loads(await self.client.result(id))
            except Expired:
                self.client.again["410"] += 1
