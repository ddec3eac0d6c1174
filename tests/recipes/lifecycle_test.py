"""A training that is interrupted, resumed, finished, started again, and continued by another."""

import dataclasses
import itertools
import json
import math
import os
import signal
import time
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.checkpoint import Checkpoints
from mint_jax.errors import Interrupted, UserError
from mint_jax.harness.start import PolicyData
from mint_jax.recipes import sft
from mint_jax.train.trainer import Trainer
from tests import configs
from tests.configs import run_config
from tests.groups import rows_of as rows


def tiny(job, *names, **changes):
    return configs.only(configs.tiny(job, tensorboard=False, **changes), *names)


@pytest.fixture
def interrupting(monkeypatch):
    """``interrupting(step, *signals)``: the update of that step sends them to this process."""
    real = Trainer.update

    def plan(step, *numbers):
        count = itertools.count(1)

        def update(self, *args, **kwargs):
            out = real(self, *args, **kwargs)
            for number in numbers if next(count) == step else ():
                os.kill(os.getpid(), number)
                time.sleep(0.05)  # Python calls handlers between two lines of its own
            return out

        monkeypatch.setattr(Trainer, "update", update)

    return plan


@pytest.fixture
def whole(tmp_path):
    """Policies of a run that was not interrupted."""
    return run_config(tiny("sft", "adder", steps=4), tmp_path / "whole")["policies"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_it_and_says_where_it_goes_on(
    number, interrupting, whole, tmp_path, capsys
):
    interrupting(3, number)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    says = rf"{number.name}; the same command goes on from step 3 of 4, which is saved in .*points"
    with pytest.raises(Interrupted, match=says) as error:
        run_config(tiny("sft", "adder", steps=4), tmp_path / "parts")
    assert error.value.number == number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert len(rows(tmp_path / "parts")) == 3
    assert run_config(tiny("sft", "adder", steps=4), tmp_path / "parts")["policies"] == whole
    assert "[sft] 4/4" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["data", "checkpoint"])
def test_a_signal_between_two_updates_ends_at_once_and_saves_what_was_learned(
    where, whole, tmp_path, monkeypatch
):
    """In the third step, before its update, and while a checkpoint is being written: the present
    step is dropped, nothing else.
    """
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
    assert run_config(tiny("sft", "adder", steps=4), tmp_path / "parts")["policies"] == whole


def test_a_finished_run_started_again_keeps_its_result(tmp_path):
    first = run_config(tiny("sft", "adder", steps=2), tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(first))
    assert run_config(tiny("sft", "adder", steps=2), tmp_path) == first
    further = run_config(tiny("sft", "adder", steps=3), tmp_path)
    assert further["policies"][0]["revision"] != first["policies"][0]["revision"]


@pytest.mark.long
def test_dpo_goes_on_from_an_sft_revision_and_refers_to_it(tmp_path):
    """The loss of the first step is log 2 where the policy is its own reference."""

    def run(workdir, steps=4, **loss):
        catalog = str(tmp_path / "catalog" / workdir)
        if not Path(catalog).exists():
            run_config(tiny("sft", "adder", steps=4, catalog=catalog), tmp_path / f"{workdir}-sft")
        config = tiny("dpo", "adder", steps=steps, catalog=catalog)
        with config.unlocked():
            config.policies.adder.loss = loss
        result = run_config(config, tmp_path / workdir)["policies"][0]
        return result, [row["loss"] for row in rows(tmp_path / workdir)]

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
        run("named", reference="nobody@3")


def test_the_best_revision_on_held_out_data_is_kept_under_an_alias(tmp_path, monkeypatch):
    """Of four measurements the second is the best; the last, which equals it, does not take its
    place.
    """
    losses = iter([9.0, 3.0, 1.0, 2.0, 1.0, 9.0])  # before, four on the way, after
    measured = dataclasses.replace(sft.SFT, measure=lambda *args: {"adder": {"loss": next(losses)}})
    monkeypatch.setattr(sft, "SFT", measured)
    run_config(tiny("sft", "adder", steps=8, export_every=8, eval_every=2), tmp_path)
    held_out = [row.get("held_out_loss") for row in rows(tmp_path)]
    assert held_out == [None, 3.0, None, 1.0, None, 2.0, None, 1.0]
    with Catalog.open(tmp_path / "catalog") as catalog:
        revisions = catalog.revisions("adder")
        assert [revision.step for revision in revisions] == [2, 4, 8]
        assert [revision.training["updates"] for revision in revisions] == [2, 2, 4]
        tokens = [sum(row["tokens"] for row in rows(tmp_path)[a:b]) for a, b in ((0, 2), (4, 8))]
        assert [revisions[i].training["tokens"] for i in (0, 2)] == tokens
        assert catalog.revision("adder", "best").step == 4
        assert catalog.revision("adder", "latest").step == 8
        assert [move.after for move in catalog.audit("adder", alias="best")] == [1, 2]
