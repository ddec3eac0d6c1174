"""The job ``fleet`` as docs/fleet.md starts it, on Ray: official clients go on while its engines
and its front are killed.
"""

import os
import signal
import threading
import time

import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from benchmarks.service_client import Served
from tests.docs_commands_test import commands_of

TOKENS = [5, 6, 7, 8, 9, 10]
INPUTS = {"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(5, np.float32)}
DATUM = types.Datum(types.ModelInput.from_ints(TOKENS[:-1]), INPUTS)
STEPS, ROUNDS = 6, 3


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("fleet") / "fleet"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TINKER_TELEMETRY": "0"}
    _, *words = commands_of("docs/fleet.md").split("mint_jax.launch --config=")[1].split()
    given = [one.removeprefix("--config.").split("=") for one in words if "--config." in one]
    options = dict(given) | {"port": 0}
    one = Served("mint_jax.launch", "configs/fleet.py:ci", workdir, options, environment)
    try:
        yield one.ready(), one
    finally:
        one.stop()


def state(url: str) -> dict:
    while True:
        try:
            return httpx.get(f"{url}/debug/state", timeout=300).raise_for_status().json()
        except httpx.HTTPError:  # the front is started again
            time.sleep(0.2)


def killed(url: str, name: str) -> None:
    """Kills an engine, or the front, and waits until another process has its place."""

    def pid() -> int:
        found = state(url)
        one = found["front"] if name == "front" else found["engines"][name]
        return one["pid"] if one.get("up", True) else 0

    old = pid()
    os.kill(old, signal.SIGKILL)
    while pid() in (0, old):
        time.sleep(0.2)


def trained(url: str, pause: threading.Event | None = None) -> list[float]:
    """The losses of a policy that the official client trains."""
    client = tinker.ServiceClient(base_url=url, api_key="tml-x")
    trainer = client.create_lora_training_client("tiny-random", 8, seed=3).result()
    losses = []
    for step in range(STEPS):
        forward = trainer.forward_backward([DATUM], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
        losses.append(forward.result().metrics["loss:sum"])
        if pause is not None and step == 1:
            pause.set()
    return losses


@pytest.mark.long
def test_clients_go_on_while_engines_and_front_are_killed(served, monkeypatch):
    url, _ = served
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    undisturbed = trained(url)
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=20)
    ask = {"model": "tiny-random", "prompt": "count", "max_tokens": 64, "seed": 5}
    ask |= {"extra_body": {"ignore_eos": True}, "temperature": 1.0}
    expected = api.completions.create(**ask).choices[0].text
    texts, done, wrong = [], threading.Event(), []

    def sample() -> None:
        while not done.is_set():
            try:
                parts = api.completions.create(**ask, stream=True)
                texts.append("".join(part.choices[0].text for part in parts if part.choices))
            except Exception as error:
                wrong.append(repr(error))

    sampling = [threading.Thread(target=sample) for _ in range(4)]
    for one in sampling:
        one.start()
    begun, losses = threading.Event(), []
    training = threading.Thread(target=lambda: losses.extend(trained(url, begun)))
    training.start()
    assert begun.wait(120)
    for name in ("e0", "e1"):
        killed(url, name)
    training.join(300)
    count = len(texts)
    done.set()
    for one in sampling:
        one.join(120)
    assert losses == undisturbed, "nothing acknowledged was lost, nothing was done twice"
    assert wrong == []
    assert count > 8
    assert set(texts) == {expected}

    killed(url, "front")
    assert api.completions.create(**ask).choices[0].text == expected
    assert trained(url) == undisturbed
