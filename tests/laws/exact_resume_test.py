"""Laws 13 and 6: train k, save, restore, train k more is train 2k bit for bit; so is a job that is
stopped, or killed, and run again.
"""

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from mint_jax import host, mesh
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.checkpoint import Checkpoints
from mint_jax.lora.tree import AdapterConfig
from mint_jax.recipes import grpo
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.configs import run_config

pytestmark = pytest.mark.bits

SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every job
SERVER.set_forkserver_preload(
    ["mint_jax.launch", "mint_jax.checkpoint", "mint_jax.catalog.lifecycle", "pytest"]
)
ROOT = Path(__file__).parents[2]
RANKS = {"c": 1, "a": 3, "b": 3}


def make(base, seed) -> Trainer:
    optimizer = OptimizerConfig(
        learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, total_steps=6, schedule="cosine"
    )
    policies = [
        PolicyConfig(n, AdapterConfig(r), optimizer, LossConfig("ppo"), seed + i)
        for i, (n, r) in enumerate(RANKS.items())
    ]
    return Trainer(base, policies)


def random_groups(rng, vocab, lengths=(6, 4)):
    def sequence(n):
        return TrainSequence(
            rng.integers(3, vocab, n).tolist(),
            [0.1] * n,
            rng.normal(size=n).tolist(),
            (-rng.exponential(size=n)).tolist(),
        )

    return [
        Group(rng.integers(3, vocab, 4).tolist(), [sequence(n) for n in lengths]) for _ in range(2)
    ]


def test_restored_training_state_continues_bit_for_bit(tiny_base, rng, tmp_path):
    base = tiny_base("llama")
    batches = [{n: random_groups(rng, base.cfg.vocab_size) for n in RANKS} for _ in range(5)]
    batches[1]["a"][0].sequences[0].advantages[0] = np.nan  # a skipped update is remembered, too

    def first_half(trainer):
        trainer.update(batches[0])
        trainer.update(batches[1])
        trainer.forward_backward(batches[2])  # the save falls between two accumulations

    def second_half(trainer):
        trainer.forward_backward(batches[3])
        trainer.optim_step(list(RANKS))
        trainer.update(batches[4])

    whole = make(base, seed=0)
    first_half(whole)
    saved = jax.tree.map(np.array, whole.state)
    assert np.array_equal(saved[4].skipped, [1, 0])
    assert any(np.any(x) for x in jax.tree.leaves(saved[4].grad_sum))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {str(b): stack for b, stack in whole.state.items()}, {"step": 3})
    second_half(whole)  # while the save is in flight: it must have its own copy
    checkpoints.close()

    resumed, again = make(base, seed=100), Checkpoints(tmp_path)
    step, arrays, extra = again.restore({str(b): stack for b, stack in resumed.state.items()})
    again.close()
    assert (step, extra) == (3, {"step": 3})
    resumed.state = {int(b): stack for b, stack in arrays.items()}
    chex.assert_trees_all_equal(resumed.state, saved)
    second_half(resumed)
    chex.assert_trees_all_equal(resumed.state, whole.state)
    assert any(
        np.any(x != y)
        for x, y in zip(
            jax.tree.leaves(whole.state[4].adapters), jax.tree.leaves(saved[4].adapters)
        )
    )


# Random text never earns a task's reward; this one differs between any two completions, so every
# step moves every policy.
ENVIRONMENT = """
from mint_jax.envs.env import Example, ListEnvironment
from tests.configs import run_config

def make(vary=False):
    prompts = [" ".join(str(i * 7919)[:3]) + " x" * (i * 5 % 11 if vary else 0) for i in range(100, 130)]
    examples = [Example(prompt, "") for prompt in prompts]
    return ListEnvironment(examples[2:], examples[:2], lambda completion, example: sum(map(ord, completion)) % 7 / 7)
"""  # noqa: E501


@pytest.fixture
def environment(tmp_path_factory, monkeypatch):
    """A folder in which a config finds ``varied:make``."""
    directory = tmp_path_factory.mktemp("environment")
    (directory / "varied.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "varied", raising=False)
    return directory


def exported(workdir) -> dict[tuple[str, int], str]:
    """(policy, step) -> digest; every revision loads, and a step that was done twice is there
    once.
    """
    out = {}
    with Catalog.open(workdir / "catalog") as catalog:
        for policy in catalog.policies():
            revisions = catalog.revisions(policy.name)
            for revision in revisions:
                catalog.load(revision.digest)
                assert (policy.name, revision.step) not in out, "a step was acknowledged twice"
                out[policy.name, revision.step] = revision.digest
            steps = [revision.step for revision in revisions]
            assert steps == sorted(steps)
            if revisions:
                assert catalog.resolve(policy.name).number == revisions[-1].number
                moves = [move.after for move in catalog.history(policy.name, "latest")]
                assert moves == sorted(moves), "latest went back"
        assert not list(catalog.verify())
    return out


def kept(workdir) -> dict[tuple[str, int], str]:
    """(policy, step) -> digest of the rollouts that the catalog keeps."""
    with Catalog.open(workdir / "catalog") as catalog:
        records = [
            record for policy in catalog.policies() for record in catalog.rollouts(policy.name)
        ]
    out = {(record.policy, record.step): record.digest for record in records}
    assert len(out) == len(records), "a step's rollouts were recorded twice"
    return out


def measured(workdir) -> list[dict]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return sorted(
        ({k: v for k, v in row.items() if k != "time"} for row in rows),
        key=lambda row: (row["step"], row["name"]),
    )


def train(steps: int, vary: bool, workdir: Path) -> dict[str, str]:
    """Runs the job of configs/tiny/grpo.py on one device; the last revision of every policy."""
    # seed 0: lengths decide what is compiled
    config = runpy.run_path(str(ROOT / "configs" / "tiny" / "grpo.py"))["get_config"]()
    config.update({"steps": steps, "export_every": 1, "tensorboard": False})
    for policy in config.policies.values():
        policy.env = {"name": "varied:make", "vary": vary}
        policy.optimizer.learning_rate = 1e-2
        policy.sampling.update({"max_tokens": 12, "stop": ("e", "a") if vary else ()})
    return {p["name"]: p["revision"] for p in run_config(config, workdir)["policies"]}


@pytest.fixture
def one_device(monkeypatch):
    made = mesh.make_mesh
    monkeypatch.setattr(
        mesh,
        "make_mesh",
        lambda sizes=None, devices=None: made(sizes, devices or jax.devices()[:1]),
    )


@pytest.mark.long
@pytest.mark.parametrize("vary", [False, True], ids=["equal lengths", "varied lengths"])
def test_grpo_stopped_and_resumed_is_grpo_uninterrupted(environment, one_device, tmp_path, vary):
    def run(steps, workdir):
        return train(steps, vary, workdir)

    whole = run(4, tmp_path / "whole")
    half = run(2, tmp_path / "parts")
    assert run(4, tmp_path / "parts") == whole
    digests = exported(tmp_path / "whole")
    assert exported(tmp_path / "parts") == digests
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")
    assert len(kept(tmp_path / "whole")) == 4 * len(whole)
    assert measured(tmp_path / "parts") == measured(tmp_path / "whole")
    assert len(set(digests.values())) == 4 * len(whole), (
        "every step of every policy made another revision"
    )
    assert whole == {name: digests[name, 4] for name in whole}
    assert half == {name: digests[name, 2] for name in whole}


def train_until_held(steps: int, workdir: Path, environment: Path, cache: str, last: int) -> None:
    """``train`` in a process of its own, whose rewards never come once so many steps are
    recorded.
    """
    sys.path.insert(0, str(environment))
    host.use_compilation_cache(cache)
    made, all_devices = mesh.make_mesh, jax.devices()
    mesh.make_mesh = lambda sizes=None, devices=None: made(sizes, devices or all_devices[:1])
    scored = grpo.ConcurrentGrpo.reward

    def reward(*args, **options):
        while rows_of(workdir) >= last:
            time.sleep(1)
        return scored(*args, **options)

    grpo.ConcurrentGrpo.reward = reward
    train(steps, False, workdir)


def rows_of(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


@pytest.mark.long
def test_grpo_killed_and_run_again_is_grpo_uninterrupted(environment, one_device, tmp_path, rng):
    """Killed at a random moment of one of its steps; the slow set kills more often, under another
    schedule.
    """
    steps, policies = 4, 3
    whole = train(steps, False, tmp_path / "whole")
    killed = tmp_path / "killed"
    cache = jax.config.jax_compilation_cache_dir
    job = SERVER.Process(
        target=train_until_held, args=(steps, killed, environment, cache, policies * (steps - 1))
    )
    job.start()
    target = rng.integers(1, policies * (steps - 1) + 1)
    while rows_of(killed) < target:
        assert job.is_alive()
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.1))
    assert job.pid is not None
    os.kill(job.pid, signal.SIGKILL)
    job.join()
    assert job.exitcode == -signal.SIGKILL
    assert len(exported(killed)) < len(exported(tmp_path / "whole"))
    assert train(steps, False, killed) == whole
    assert exported(killed) == exported(tmp_path / "whole")
    assert kept(killed) == kept(tmp_path / "whole")
    assert measured(killed) == measured(tmp_path / "whole")


@pytest.mark.slow
def test_grpo_killed_at_any_moment_ends_as_if_uninterrupted(environment, tmp_path, rng):
    steps, kills = 24, 4

    def launch(workdir):
        names = ("ppo", "cispo", "reinforce")
        config = [f"--config.policies.{n}.env.name=varied:make" for n in names]
        config += [f"--config.policies.{n}.optimizer.learning_rate=0.01" for n in names]
        config += [
            f"--config.steps={steps}",
            "--config.export_every=1",
            "--config.checkpoint.every=2",
            "--config.schedule=overlapped",
        ]
        # one device
        env = os.environ | {"PYTHONPATH": f"{environment}{os.pathsep}{ROOT}", "XLA_FLAGS": ""}
        command = [
            sys.executable,
            "-m",
            "mint_jax.launch",
            f"--config={ROOT / 'configs/tiny/grpo.py'}",
            f"--workdir={workdir}",
            *config,
        ]
        return subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    assert launch(tmp_path / "whole").wait(timeout=600) == 0
    killed = tmp_path / "killed"
    for k in range(kills):
        job = launch(killed)
        # of 3 policies' rows, further each time
        target = 3 * steps * (k + rng.uniform(0.1, 0.9)) / kills
        while rows_of(killed) < target and job.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        job.send_signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL, "the job ended before it was killed"
        if (killed / "catalog" / "catalog.db").is_file():
            exported(killed)
    assert launch(killed).wait(timeout=600) == 0
    assert exported(killed) == exported(tmp_path / "whole")
    assert kept(killed) == kept(tmp_path / "whole")
    assert measured(killed) == measured(tmp_path / "whole")
    results = [
        json.loads((w / "result.json").read_text())["policies"]
        for w in (killed, tmp_path / "whole")
    ]
    assert results[0] == results[1]
