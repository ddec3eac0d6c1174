"""SIGINT and SIGTERM end a program within seconds in every phase, and lose nothing that was
acknowledged.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mint_jax import interrupts
from mint_jax.catalog.lifecycle import Catalog

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
    "bytecodes": ("while True: pass", True),
    "waiting": ("threading.Event().wait()", True),
    "a call into C, as XLA compiles": ("hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)", False),
    "an error that is discarded": (
        "while True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass",
        False,
    ),
    "a callback that discards errors": (
        (
            "class Held:\n    def __del__(self):\n        time.sleep(1)\nheld = Held()\ndel"
            " held\ntime.sleep(60)"
        ),
        True,
    ),
    "a thread that does not end": (
        (
            "threading.Thread(target=time.sleep, args=(60,)).start()\ntry:\n   "
            " time.sleep(60)\nexcept KeyboardInterrupt:\n    pass"
        ),
        False,
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
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
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


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("options", "phase"),
    [
        ((SFT, "--config.steps=100000"), "loading base"),
        ((SFT, "--config.steps=100000"), "MB with gradients and optimizer state"),
        ((SFT, "--config.steps=100000"), "[sft] 1/"),
        ((SFT, "--config.steps=100000", "--config.checkpoint.every=1"), "[sft] 1/"),
        (
            ("--config=configs/tiny/grpo.py", "--config.steps=100000"),
            "held-out reward before training",
        ),
        (("--config=configs/tiny/grpo.py", "--config.steps=100000"), "[grpo] 1/"),
        ((SERVE, "--config.port=0"), "base tiny-random"),
    ],
    ids=["load", "compile", "update", "checkpoint", "rollout", "reward", "warm-up"],
)
def test_a_signal_ends_each_phase_of_a_job(options, phase, number, tmp_path):
    run = Launched(tmp_path / "work", *options)
    run.wait_for(phase)
    assert run.interrupt(number) < interrupts.GRACE_S + SLACK_S
    assert run.process.returncode in (128 + number, 0 if SERVE in options else 128 + number)
    assert "Traceback" not in "\n".join(run.lines), run.lines


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_twenty_interruptions_at_random_moments_lose_nothing(number, tmp_path):
    """The same command again and again: each start goes on where the last one said, and the end is
    that of a run in one go.
    """
    options = (SFT, "--config.steps=200", "--config.checkpoint.every=7", "--config.export_every=50")
    whole = Launched(tmp_path / "whole", *options)
    assert whole.process.wait(900) == 0, whole.lines[-20:]
    workdir, said, interrupted = tmp_path / "parts", 0, 0
    moments = random.Random(int(os.environ["MINT_TEST_SEED"]))
    for n in range(20):
        # a run that begins is not like one that goes on, and one that is finished has few phases
        if n % 5 == 0:
            shutil.rmtree(workdir, ignore_errors=True)
            said = 0
        run = Launched(workdir, *options)
        time.sleep(moments.uniform(0.3, 15.0))
        if run.process.poll() is not None:
            continue  # it had ended
        assert run.interrupt(number) < interrupts.GRACE_S + SLACK_S
        text = "\n".join(run.lines)
        if "[launch]" not in text or run.process.returncode == 0:
            continue  # Python had not come to the program, or it had done all
        interrupted += 1
        assert run.process.returncode == 128 + number, text
        assert "Traceback" not in text or "Exception ignored" in text
        if resumed := re.search(r"resumed at step (\d+) of", text):
            assert int(resumed[1]) >= said, "what was said to be saved is saved"
        if saved := re.search(r"goes on from step (\d+) of", run.lines[-1]):
            said = int(saved[1])
    assert interrupted >= 10
    run = Launched(workdir, *options)
    assert run.process.wait(900) == 0, run.lines[-20:]
    one, parts = (
        json.loads((folder / "result.json").read_text())["policies"]
        for folder in (tmp_path / "whole", workdir)
    )
    assert [p["revision"] for p in parts] == [p["revision"] for p in one], "bit for bit"
    with Catalog.open(workdir / "catalog") as catalog:
        for policy in catalog.policies():
            for revision in catalog.revisions(policy.policy):
                catalog.load(revision.digest)
