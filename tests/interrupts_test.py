"""SIGINT and SIGTERM end a program within seconds in every phase, and lose nothing that was
acknowledged.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mint_jax import interrupts

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
SLACK_S = 20.0  # beyond the grace: a machine that runs other tests is slow to start a thread

HEAD = """
import gc, hashlib, sys, threading, time
from mint_jax import interrupts
interrupts.GRACE_S, interrupts.AGAIN_S = 1.5, 0.2
interrupts.install(lambda status, reason: None)
interrupts.standing(lambda: "it goes on from step 7")
print("ready", flush=True)
"""
PHASES = {  # what a main thread may be at; which of them end by themselves
    "waiting": ("threading.Event().wait()", True),
    "a call into C, as XLA compiles": ("hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)", False),
    "an error that is discarded": (
        "while True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass",
        False,
    ),
    "a callback that discards errors": (
        "class Held:\n def __del__(self): time.sleep(1)\nheld = Held()\ndel held\ntime.sleep(60)",
        True,
    ),
}


def test_an_error_that_native_code_makes_of_a_signal_has_its_status():
    code = """
import os, signal, time
from mint_jax import launch

def main(arguments):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except KeyboardInterrupt:
        raise RuntimeError("a callback failed") from None

launch.cli(main)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 128 + signal.SIGTERM
    assert "a callback failed" in found.stderr


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_program_whatever_its_main_thread_does(number):
    started = {}
    for phase, (code, _) in PHASES.items():
        command = [sys.executable, "-c", HEAD + code]
        started[phase] = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    for process in started.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)  # into the phase
    for process in started.values():
        process.send_signal(number)
    for phase, process in started.items():
        _, err = process.communicate(timeout=SLACK_S)
        if PHASES[phase][1]:  # here the exception ends the program, which launch reports
            assert process.returncode != 0, phase
            assert f"mint_jax.errors.Interrupted: {number.name}" in err, phase
            assert "Exception ignored" not in err, phase
        else:
            assert process.returncode == 128 + number, phase
            assert f"{number.name}: stopping within" in err, phase
            assert err.splitlines()[-1] == f"interrupted: {number.name}; it goes on from step 7", (
                phase
            )


class Launched:
    """A job in a process of its own, and what it has said."""

    def __init__(self, workdir: Path, *options: str):
        command = [sys.executable, "-m", "mint_jax.launch", f"--workdir={workdir}", *options]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **streams)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()

    def wait_for(self, text: str, seconds: float = 300.0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: any(text in line for line in self.lines), seconds), (
                self.lines[-20:]
            )

    def interrupt(self, number: signal.Signals) -> float:
        """Sends the signal; seconds until the process has ended."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(interrupts.GRACE_S + SLACK_S)
        self._reader.join(5)
        return time.monotonic() - began


SFT, SERVE = "--config=configs/tiny/sft.py", "--config=configs/serve.py:ci"
STEPS = "--config.steps=100000"


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("options", "phase"),
    [
        ((SFT, STEPS), "loading base"),
        ((SFT, STEPS), "MB with gradients and optimizer state"),
        ((SFT, STEPS, "--config.checkpoint.every=1"), "[sft] 1/"),
        (("--config=configs/tiny/grpo.py", STEPS), "held-out reward before training"),
        (("--config=configs/tiny/grpo.py", STEPS), "[grpo] 1/"),
        ((SERVE, "--config.port=0"), "base tiny-random"),
    ],
    ids=["load", "compile", "checkpoint", "rollout", "reward", "warm-up"],
)
def test_a_signal_ends_each_phase_of_a_job(options, phase, number, tmp_path):
    run = Launched(tmp_path / "work", *options)
    run.wait_for(phase)
    assert run.interrupt(number) < interrupts.GRACE_S + SLACK_S
    assert run.process.returncode in (128 + number, 0 if SERVE in options else 128 + number)
    assert "Traceback" not in "\n".join(run.lines), run.lines
