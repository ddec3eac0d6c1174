"""The job ``serve`` as a user starts it: one line says where it is, the official client trains and
samples, SIGTERM ends it, and the same command goes on.
"""

import os
import socket
import time

import httpx
import pytest
import tinker
from tinker import types

from benchmarks.service_client import Served
from mint_jax.errors import UserError
from mint_jax.models.base import cache_dir
from tests.configs import load, run_config

WAIT_S = 120


def served(workdir, environment=None, **options) -> Served:
    """The command in a process of its own."""
    usual = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | (environment or {})
    return Served("mint_jax.launch", "configs/serve.py:ci", workdir, options, usual)


def datum(tokens):
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@pytest.mark.long
def test_a_server_is_started_used_stopped_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    data, prompt = [datum([5, 6, 7, 8, 9, 10])], types.ModelInput.from_ints([5, 6])
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    first = served(tmp_path / "serve")
    try:
        client = tinker.ServiceClient(base_url=first.ready(), api_key="tml-any")
        trained = client.create_lora_training_client(base_model="tiny-random", rank=8).result()
        losses = []
        for _ in range(4):
            forward = trained.forward_backward(data, "cross_entropy")
            # of 8 first factors all fall; at 0.05 one rose
            updated = trained.optim_step(types.AdamParams(learning_rate=0.01))
            losses.append(forward.result().metrics["loss:sum"])
            assert updated.result().metrics["skipped"] == 0
        assert losses[-1] < losses[0]
        state = trained.save_state("one").result().path
        weights = trained.save_weights_for_sampler("one").result().path
        sampler = client.create_sampling_client(model_path=weights).result()
        tokens = sampler.sample(prompt, 1, greedy).result().sequences[0].tokens
        expected = trained.forward(data, "cross_entropy").result().metrics["loss:sum"]
    finally:
        result = first.stop()
    assert result["stopped_by"] == "SIGTERM"
    assert result["tokens_sampled"] >= 4
    assert result["training_steps"] >= 5
    again = served(tmp_path / "serve")
    try:
        client = tinker.ServiceClient(base_url=again.ready(), api_key="tml-any")
        sampler = client.create_sampling_client(model_path=weights).result()
        assert sampler.sample(prompt, 1, greedy).result().sequences[0].tokens == tokens
        resumed = client.create_training_client_from_state_with_optimizer(state).result()
        loss = resumed.forward(data, "cross_entropy").result().metrics["loss:sum"]
        assert loss == pytest.approx(expected, rel=1e-5), "batched with other rows"
    finally:
        again.stop()


@pytest.mark.long
def test_a_server_that_compiles_listens_and_ends_at_once(tmp_path):
    """With an empty compilation cache; what XLA compiles cannot be interrupted, and is left
    behind.
    """
    for made in ("bases", "native"):  # these take their time, too
        if (cache_dir() / made).exists():
            (tmp_path / "cache").mkdir(exist_ok=True)
            os.symlink(cache_dir() / made, tmp_path / "cache" / made)
    one = served(tmp_path / "serve", {"MINT_JAX_CACHE": str(tmp_path / "cache")})
    try:
        url, deadline = one.listening(), time.monotonic() + WAIT_S
        assert httpx.get(f"{url}/health").status_code == 200
        while httpx.get(f"{url}/ready").json().get("programs_ready", 0) < 1:
            assert time.monotonic() < deadline, one.log()
            time.sleep(0.05)
        began = time.monotonic()
        assert one.stop()["stopped_by"] == "SIGTERM"  # with exit code 0
        assert time.monotonic() - began < 15, "on a busy machine; alone it takes a second"
    finally:
        one.kill()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("host=0.0.0.0", "without keys"),
        ("ranks=(3,)", "powers of two"),
        ("shapes=((1,2),)", "shapes has"),
        ("precompile=later", "precompile"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_served(option, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run_config(load("configs/serve.py:ci", f"--config.{option}"), tmp_path)


def test_a_port_that_is_taken_is_told_before_the_base_is_loaded(tmp_path, capfd):
    says = r"port \d+ of 127.0.0.1 cannot be used"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=says):
        run_config(load("configs/serve.py:ci", f"--config.port={taken.getsockname()[1]}"), tmp_path)
    assert "loading base" not in capfd.readouterr().err
