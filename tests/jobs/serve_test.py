"""The job ``serve`` as a user starts it: one line says where it is, the official client trains and samples, SIGTERM ends it, and the same
command goes on."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import tinker
from tinker import types

from mint_jax.errors import UserError
from mint_jax.jobs import serve
from tests.laws.configs_trace_test import ROOT, load

WAIT_S = 600


class Served:
    """The command in a process of its own."""

    def __init__(self, workdir, *options):
        self.workdir = workdir
        command = [sys.executable, "-m", "mint_jax.launch", "--config=configs/serve.py:ci", f"--workdir={workdir}", *options]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        self.errors: list[str] = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)  # type: ignore[arg-type]
        self._reader.start()
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        assert line, "".join(self.errors)[-3000:]
        told = json.loads(line)
        assert told["ready"] is True
        self.url = told["url"]

    def stop(self) -> dict:
        """The result that it leaves."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, "".join(self.errors)[-3000:]
        return json.loads((self.workdir / "result.json").read_text())


def datum(tokens):
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@pytest.mark.long
def test_a_server_is_started_used_stopped_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    data, prompt = [datum([5, 6, 7, 8, 9, 10])], types.ModelInput.from_ints([5, 6])
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    served = Served(tmp_path / "serve")
    try:
        client = tinker.ServiceClient(base_url=served.url, api_key="tml-any")
        trained = client.create_lora_training_client(base_model="tiny-random", rank=8).result()
        losses = []
        for _ in range(4):
            forward = trained.forward_backward(data, "cross_entropy")
            updated = trained.optim_step(types.AdamParams(learning_rate=0.01))  # of 8 first factors all fall; at 0.05 one rose
            losses.append(forward.result().metrics["loss:sum"])
            assert updated.result().metrics["skipped"] == 0
        assert losses[-1] < losses[0]
        state, weights = trained.save_state("one").result().path, trained.save_weights_for_sampler("one").result().path
        sampler = client.create_sampling_client(model_path=weights).result()
        tokens = sampler.sample(prompt, 1, greedy).result().sequences[0].tokens
        expected = trained.forward(data, "cross_entropy").result().metrics["loss:sum"]
    finally:
        result = served.stop()
    assert result["stopped_by"] == "SIGTERM"
    assert result["tokens_sampled"] >= 4
    assert result["training_steps"] >= 5
    again = Served(tmp_path / "serve")
    try:
        client = tinker.ServiceClient(base_url=again.url, api_key="tml-any")
        sampler = client.create_sampling_client(model_path=weights).result()
        assert sampler.sample(prompt, 1, greedy).result().sequences[0].tokens == tokens
        resumed = client.create_training_client_from_state_with_optimizer(state).result()
        assert resumed.forward(data, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)  # another company
    finally:
        again.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config.host=0.0.0.0"], "without keys"),
        (["--config.ranks=(3,)"], "powers of two"),
        (["--config.ranks=()"], "ranks is empty"),
        (["--config.shapes=((1,2),)"], "shapes has"),
        (["--config.gap_s=0"], "gap_s"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_served(options, message, tmp_path):
    config = load("configs/serve.py:ci", *options)
    with pytest.raises(UserError, match=message):
        serve.run(config, tmp_path)
