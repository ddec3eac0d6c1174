"""A training's course: interrupted, resumed, finished, started again, and gone on from a revision
that exists.
"""

import dataclasses
import json
import math
import os
import runpy
import signal
import time
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.checkpoint import Checkpoints
from mint_jax.errors import Interrupted, UserError
from mint_jax.harness.start import PolicyData
from mint_jax.recipes import grpo, sft
from mint_jax.train.trainer import Trainer
from tests.configs import run_config
from tests.marks import first

ROOT = Path(__file__).parents[2]
WAIT_S = 300


def tiny(job, *names, **changes):
    config = runpy.run_path(str(ROOT / "configs" / "tiny" / f"{job}.py"))["get_config"]()
    config.update(changes)
    for name in [n for n in config.policies if names and n not in names]:
        del config.policies[name]
    return config


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def interrupting(monkeypatch):
    """``interrupting(step, *signals)``: the update of that step sends them to this process."""
    real = Trainer.update
    planned: dict[int, list] = {}
    count = [0]

    def update(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        count[0] += 1
        for number in planned.pop(count[0], []):
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # Python calls handlers between two lines of its own
        return out

    monkeypatch.setattr(Trainer, "update", update)

    def plan(step, *numbers):
        count[0] = 0
        planned[step] = list(numbers)

    return plan


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_it_and_says_where_it_goes_on(
    number, interrupting, tmp_path, capsys
):
    whole = run_config(tiny("sft", "adder", steps=4), tmp_path / "whole")
    interrupting(3, number)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(
        Interrupted,
        match=(
            rf"{number.name}; the same command goes on from step 3 of 4, which is saved in"
            r" .*checkpoints"
        ),
    ) as error:
        run_config(tiny("sft", "adder", steps=4), tmp_path / "parts")
    assert error.value.number == number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers, (
        "the handlers are those of before"
    )
    assert len(rows(tmp_path / "parts")) == 3
    resumed = run_config(tiny("sft", "adder", steps=4), tmp_path / "parts")
    assert resumed["policies"] == whole["policies"]
    assert "[sft] 4/4" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["data", "checkpoint"])
def test_a_signal_between_two_updates_ends_at_once_and_saves_what_was_learned(
    where, tmp_path, monkeypatch
):
    """In the third step, before its update, and while a checkpoint is being written: the step under
    way is dropped, nothing else.
    """
    whole = run_config(tiny("sft", "adder", steps=4), tmp_path / "whole")
    owner, method = {"data": (PolicyData, "chosen"), "checkpoint": (Checkpoints, "save")}[where]
    real, calls = getattr(owner, method), []

    def interrupted(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == (3 if where == "data" else 1):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, interrupted)
        config = tiny("sft", "adder", steps=4)
        config.checkpoint.every = 100 if where == "data" else 2
        with pytest.raises(Interrupted, match="SIGTERM; the same command goes on from step 2 of 4"):
            run_config(config, tmp_path / "parts")
    assert len(rows(tmp_path / "parts")) == 2
    assert (
        run_config(tiny("sft", "adder", steps=4), tmp_path / "parts")["policies"]
        == whole["policies"]
    )


def test_a_second_signal_does_not_wait(interrupting, tmp_path):
    interrupting(2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(
        Interrupted,
        match="SIGINT; no checkpoint was written yet: the same command starts from the beginning",
    ):
        run_config(tiny("sft", "adder", steps=4), tmp_path)
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize(
    "job", [sft, pytest.param(grpo, marks=pytest.mark.long)], ids=["sft", "grpo"]
)
def test_a_finished_run_started_again_keeps_its_result(job, tmp_path):
    name = job.__name__.rpartition(".")[2]
    only = {"sft": "adder", "grpo": "ppo"}[name]
    first = run_config(tiny(name, only, steps=2, tensorboard=False), tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(first))
    assert run_config(tiny(name, only, steps=2, tensorboard=False), tmp_path) == first
    further = run_config(tiny(name, only, steps=3, tensorboard=False), tmp_path)
    if name == "sft":
        assert further["policies"][0]["revision"] != first["policies"][0]["revision"]
    else:  # rewards may be equal in its last step, which then moves nothing
        assert further["sampled_tokens"] > first["sampled_tokens"] > 0, "of the whole run"
        assert further["train_s"] >= first["train_s"]


@pytest.mark.long
def test_dpo_goes_on_from_an_sft_revision_and_refers_to_it(tmp_path):
    """The loss of the first step tells the reference: log 2 where the policy is its own, whatever
    the base says.
    """

    def run(workdir, steps=4, **loss):
        config = tiny(
            "dpo",
            "adder",
            steps=steps,
            catalog=str(tmp_path / "catalog" / workdir.partition("-")[0]),
        )
        with config.unlocked():
            config.policies.adder.loss = loss
        result = run_config(config, tmp_path / workdir)["policies"][0]
        return result, [row["loss"] for row in rows(tmp_path / workdir)]

    for workdir in ("start", "base", "whole"):
        run_config(
            tiny("sft", "adder", steps=4, catalog=str(tmp_path / "catalog" / workdir)),
            tmp_path / f"{workdir}-sft",
        )
    result, losses = run("start", steps=2)
    # float32: the policy's and the reference's log-probabilities are equal
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert (result["margin_before"], result["margin_after"] > 0.01) == (0.0, True)
    whole, one_go = run("whole")
    # the reference is still where the run began, not where it was interrupted
    resumed, parts = run("start")
    assert (resumed["revision"], parts) == (whole["revision"], one_go)
    result, losses = run("base", reference="base")
    assert abs(losses[0] - math.log(2)) > 1e-3
    assert result["margin_before"] != 0.0
    with pytest.raises(UserError, match="nobody"):
        run("start-named", reference="nobody@3")


def test_an_alpha_that_is_no_scale_is_refused_up_front(tmp_path, monkeypatch):
    config = tiny("sft", "adder")
    config.policies.adder.adapter.alpha = float("nan")
    monkeypatch.setattr(Trainer, "update", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises(UserError, match=r"policies.adder.adapter.alpha is nan; expected a finite"):
        run_config(config, tmp_path)


@pytest.mark.parametrize("job", first(1, [sft, grpo]), ids=["sft", "grpo"])
def test_the_best_revision_on_held_out_data_is_kept_under_an_alias(job, tmp_path, monkeypatch):
    """Of four measurements the second is the best; the last, which equals it, does not take its
    place.
    """
    name, only = (("sft", "adder"), ("grpo", "ppo"))[job is grpo]
    if job is sft:
        losses = iter([9.0, 3.0, 1.0, 2.0, 1.0, 9.0])  # before, four on the way, after
        monkeypatch.setattr(
            sft,
            "SFT",
            dataclasses.replace(sft.SFT, measure=lambda *args: {only: {"loss": next(losses)}}),
        )
    else:
        rewards = iter([0.0, 1.0, 3.0, 2.0, 3.0, 0.0])
        monkeypatch.setattr(
            grpo.ConcurrentGrpo, "evaluate", lambda *args: {only: (next(rewards), [""] * 100)}
        )
    run_config(tiny(name, only, steps=8, export_every=8, eval_every=2, tensorboard=False), tmp_path)
    key, values = (
        ("held_out_loss", [3.0, 1.0, 2.0, 1.0])
        if job is sft
        else ("held_out_reward", [1.0, 3.0, 2.0, 3.0])
    )
    assert [row.get(key) for row in rows(tmp_path)] == [
        value for pair in zip([None] * 4, values) for value in pair
    ]
    with Catalog.open(tmp_path / "catalog") as catalog:
        assert [revision.step for revision in catalog.revisions(only)] == [2, 4, 8]
        assert catalog.revision(only, "best").step == 4
        assert catalog.revision(only, "latest").step == 8
        assert [move.after for move in catalog.history(only, "best")] == [1, 2]
