"""Laws 13 and 6: train k, save, restore, train k more is train 2k bit for bit; so is a job that is
stopped, or killed, and run again.
"""

import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from mint_jax import host, mesh
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.rollouts import unpack_rollouts
from mint_jax.checkpoint import Checkpoints
from mint_jax.lora.tree import AdapterConfig
from mint_jax.recipes import grpo
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.configs import run_config, tiny
from tests.groups import random_groups, rows_of, write_environment

pytestmark = pytest.mark.bits

SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every job
SERVER.set_forkserver_preload(
    ["mint_jax.launch", "mint_jax.checkpoint", "mint_jax.catalog.lifecycle", "pytest"]
)
RANKS = {"c": 1, "a": 3, "b": 3, "d": 0}
KINDS = {"c": "basis", "d": "bias"}


def make(base, seed) -> Trainer:
    how = {"weight_decay": 0.1, "warmup_steps": 2, "total_steps": 6, "schedule": "cosine"}
    policies = []
    for i, (n, rank) in enumerate(RANKS.items()):
        adapter = AdapterConfig(rank, kind=KINDS.get(n, "lora"))
        own = OptimizerConfig(1e-2, **how, kind="dimuon" if n == "b" else "adamw")
        more = LossConfig("ppo"), seed + i
        policies.append(PolicyConfig(n, adapter, own, *more, dropout=0.3 * (i < 2)))
    return Trainer(base, policies)


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
    resumed.policies.update(whole.policies)  # dropout draws from their seeds
    resumed.state = {int(b): stack for b, stack in arrays.items()}
    chex.assert_trees_all_equal(resumed.state, saved)
    second_half(resumed)
    chex.assert_trees_all_equal(resumed.state, whole.state)
    adapters = (jax.tree.leaves(state[4].adapters) for state in (whole.state, saved))
    assert any(np.any(x != y) for x, y in zip(*adapters))


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
                moves = [move.after for move in catalog.audit(policy.name, alias="latest")]
                assert moves == sorted(moves), "latest went back"
        assert not list(catalog.verify())
    return out


def trained(workdir) -> dict[tuple[str, int], dict[str, float]]:
    """(policy, step) -> what the revision records of its training: one update each."""
    with Catalog.open(workdir / "catalog") as catalog:
        found = [one for policy in catalog.policies() for one in catalog.revisions(policy.name)]
    out = {(one.policy, one.step): one.training or {} for one in found}
    rows = {(row["name"], row["step"] + 1): row for row in measured(workdir)}
    assert out == {at: {k: rows[at].get(k, 1) for k in facts} for at, facts in out.items()}
    assert all(facts.keys() >= {"updates", "tokens", "effective"} for facts in out.values())
    return out


def kept(workdir) -> dict[tuple[str, int], str]:
    """(policy, step) -> digest of the rollouts that the catalog keeps."""
    with Catalog.open(workdir / "catalog") as catalog:
        records = [r for policy in catalog.policies() for r in catalog.rollouts(policy.name)]
    out = {(record.policy, record.step): record.digest for record in records}
    assert len(out) == len(records), "a step's rollouts were recorded twice"
    return out


def drawn_by(workdir) -> dict[tuple[str, int, int], set[str]]:
    """(policy, step, turn) -> digests of the revisions that drew the kept rollouts."""
    digests, out = kept(workdir), defaultdict(set)
    with Catalog.open(workdir / "catalog") as catalog:
        loaded = {at: unpack_rollouts(catalog.load_payload(d)) for at, d in digests.items()}
    for at, one in loaded.items():
        for row in itertools.chain(*one.revisions):  # the environment's tokens are between turns
            for turn, digest in enumerate((d for d, _ in itertools.groupby(row) if d), 1):
                out[*at, turn].add(digest)
    return out


def measured(workdir) -> list[dict]:
    rows = [{k: v for k, v in row.items() if k != "time"} for row in rows_of(workdir)]
    return sorted(rows, key=lambda row: (row["step"], row["name"]))


def assert_same_run(one: Path, other: Path) -> None:
    assert exported(one) == exported(other)
    assert kept(one) == kept(other)
    assert trained(one) == trained(other)
    assert measured(one) == measured(other)


def train(
    steps: int, workdir: Path, vary=False, schedule="batched", stale=0, turns=1, parts=False
) -> dict[str, str]:
    """Runs the job of configs/tiny/grpo.py; returns the last revision of every policy."""
    changes = {"steps": steps, "export_every": 1, "tensorboard": False, "schedule": schedule}
    config = tiny("grpo", **changes)
    with config.unlocked():
        config.policies.reinforce.dropout = 0.2
        if stale:
            config.max_staleness, config.checkpoint.every = stale, 1
            config.partial_rollouts = parts
            config.policies.reinforce.loss.kind = "importance_sampling"
    for policy in config.policies.values():
        policy.env = {"name": "varied:make", "vary": vary, "turns": turns}
        policy.optimizer.learning_rate = 1e-2
        policy.sampling.update({"max_tokens": 12, "stop": ("e", "a") if vary else ()})
        policy.sampling.update({"mask_truncated": vary, "resample": 2 * vary, "max_turns": turns})
    return {p["name"]: p["revision"] for p in run_config(config, workdir)["policies"]}


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [{}, {"vary": True}, {"turns": 3}],
    ids=["equal lengths", "varied lengths", "conversations"],
)
def test_grpo_stopped_and_resumed_is_grpo_uninterrupted(one_device, tmp_path, monkeypatch, how):
    write_environment(tmp_path, monkeypatch)
    whole = train(4, tmp_path / "whole", **how)
    half = train(2, tmp_path / "parts", **how)
    assert train(4, tmp_path / "parts", **how) == whole
    assert all(row.get("turns", 2) > 1 for row in measured(tmp_path / "whole"))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    digests = exported(tmp_path / "whole")
    assert len(kept(tmp_path / "whole")) == 4 * len(whole)
    assert len(set(digests.values())) == 4 * len(whole), "every step made another revision"
    assert whole == {name: digests[name, 4] for name in whole}
    assert half == {name: digests[name, 2] for name in whole}


def train_until_held(steps: int, workdir: Path, last: int, how: dict, cache: str) -> None:
    """Runs ``train`` in a process of its own; its rewards stop once ``last`` rows are recorded."""
    sys.path.insert(0, str(workdir.parent))
    host.use_compilation_cache(cache)
    made, all_devices = mesh.make_mesh, jax.devices()
    mesh.make_mesh = lambda sizes=None, devices=None: made(sizes, devices or all_devices[:1])
    scored = grpo.ConcurrentGrpo.reward

    def reward(*args, **options):
        while count_of(workdir) >= last:
            time.sleep(1)
        return scored(*args, **options)

    grpo.ConcurrentGrpo.reward = reward
    train(steps, workdir, **how)


def count_of(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("steps", "kills", "how", "number"),
    [
        (4, 1, {}, signal.SIGKILL),
        (4, 1, {"schedule": "overlapped", "turns": 3}, signal.SIGKILL),
        (4, 1, {"stale": 1}, signal.SIGKILL),
        (4, 1, {"stale": 1, "turns": 3}, signal.SIGKILL),
        (4, 1, {"stale": 1, "parts": True}, signal.SIGKILL),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (9, 2, {"schedule": "overlapped", "stale": 2}, signal.SIGTERM),
                (9, 2, {"schedule": "overlapped", "stale": 2, "parts": True}, signal.SIGTERM),
                (24, 4, {"schedule": "overlapped"}, signal.SIGKILL),
            )
        ),
    ],
    ids=str,
)
def test_grpo_killed_and_run_again_is_grpo_uninterrupted(
    steps, kills, how, number, one_device, tmp_path, rng, monkeypatch
):
    """Each kill falls at a random moment, later than the one before. Tokens know the revision that
    drew them: that of ``stale`` updates before, and further turns and parts are spread over the
    updates since.
    """
    write_environment(tmp_path, monkeypatch)
    stale = how.get("stale", 0)
    turns = stale + 1 if "parts" in how else how.get("turns", 1)
    whole = train(steps, tmp_path / "whole", **how)
    drawers, digests = drawn_by(tmp_path / "whole"), exported(tmp_path / "whole")
    assert max(turn for *_, turn in drawers) == turns
    at_once = -(-turns // (stale + 1))  # turns between two updates
    for (name, step, turn), drawer in drawers.items():
        if (updates := step - stale - 1 + -(-turn // at_once)) > 0:
            assert drawer == {digests[name, updates]}
    rows = rows_of(tmp_path / "whole")
    assert all(row.get("stalest", 0) == min(row["step"], stale) for row in rows)
    killed, last = tmp_path / "killed", 3 * (steps - 1)  # rows of three policies
    cache = jax.config.jax_compilation_cache_dir
    for k in range(kills):
        job = SERVER.Process(target=train_until_held, args=(steps, killed, last, how, cache))
        job.start()
        target = max(1, int(last * (k + rng.uniform()) / kills))
        while count_of(killed) < target:
            assert job.is_alive()
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(job.pid, number)
        job.join()
        assert job.exitcode == (-number if number == signal.SIGKILL else 1)
        assert len(exported(killed)) < len(exported(tmp_path / "whole"))
    assert train(steps, killed, **how) == whole
    assert_same_run(killed, tmp_path / "whole")
