"""``import mint_jax as mint``: the README's ten lines, and that its objects do what those of the
jobs do.
"""

import ast
import dataclasses
import re
from pathlib import Path

import chex
import numpy as np
import pytest

import mint_jax as mint
from mint_jax import api, launch, mesh, recipes
from mint_jax.harness import settings
from mint_jax.lora.tree import AdapterConfig
from mint_jax.recipes import sft
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer

ROWS = [
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"text": "two and two are four"},
    {"prompt": "3 + 4 =", "completion": " 7"},
]


@pytest.fixture
def model():
    return mint.load("tiny-random", mesh=mesh.single_device_mesh())


def test_every_name_is_there_and_no_other():
    for name in mint.__all__:
        assert getattr(mint, name) is not None
    assert {"load", "open", "Trainer", "Catalog", "AdapterConfig"} <= set(dir(mint))
    with pytest.raises(AttributeError, match="nothing"):
        mint.nothing  # noqa: B018


def test_the_lines_of_the_readme_run(tmp_path, monkeypatch, capsys):
    [code] = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.S
    )
    assert len(code.strip().splitlines()) <= 11
    monkeypatch.chdir(tmp_path)
    load = api.load
    one = mesh.single_device_mesh()
    monkeypatch.setattr(api, "load", lambda name: load("tiny-random", mesh=one))
    exec(code, {})
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    assert shown[0].endswith(shown[1]), "the stored revision answers as the policy did"


@pytest.mark.long
def test_the_lines_of_the_page_of_jobs_run(tmp_path, monkeypatch, capsys):
    [rollouts, code] = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs/jobs.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    exec(rollouts, found := {})
    job = {"job": "sft", "base": "tiny-random", "catalog": "other", "steps": 1}
    policy = {"data": found["data"], "adapter": {"rank": 2}}
    read = recipes.read(job | {"policies": {"a": policy}})
    assert read.policies["a"].data.min_reward == 1.0
    exec(code.replace("smollm2-135m-instruct", "tiny-random").replace("steps=4", "steps=1"), {})
    policy, base = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(policy, str)
    assert isinstance(base, str)
    assert (tmp_path / "runs/from-python/result.json").is_file()


def test_training_sampling_and_saving_are_those_of_the_jobs(model, tmp_path):
    mine = model.policy("a", 3, targets=("q", "down"), learning_rate=1e-2, seed=5)
    adapter, how = AdapterConfig(3, 6.0, ("q", "down")), LossConfig("cross_entropy")
    seed = model.trainer.policies["a"].seed
    config = PolicyConfig("a", adapter, OptimizerConfig(1e-2), how, seed)
    theirs = Trainer(model.base, [config])
    groups = sft.weighted([sft.to_group(model.base, row, "row", True) for row in ROWS])
    before = model.sample("3 + 4 =", max_tokens=6)
    assert mine.sample("3 + 4 =", max_tokens=6) == before, "a fresh adapter changes nothing"
    losses = []
    for _ in range(3):
        said, expected = mine.train_step(ROWS), theirs.update({"a": groups})["a"]
        assert said == expected
        losses.append(said["loss"])
    assert losses[2] < losses[0]
    chex.assert_trees_all_equal(model.trainer.adapter("a"), theirs.adapter("a"))
    assert mine.steps == 3
    made = mine.save(tmp_path / "catalog", why="a test")
    assert (made.policy, made.number, made.step) == ("a", 1, 3)
    [[now]] = mine.completions(["3 + 4 ="], max_tokens=6)
    mine.train_step(ROWS)
    with mint.open(tmp_path / "catalog") as store:
        stored = store["a@latest"]
        assert (stored.name, stored.digest) == ("a@1", made.digest)
        [[kept]] = model.completions(["3 + 4 ="], stored, max_tokens=6)
    assert (kept.tokens, kept.revision) == (now.tokens, made.digest)
    np.testing.assert_allclose(kept.logprobs, now.logprobs, atol=1e-5)
    assert model.sample("3 + 4 =", max_tokens=6) == before, "the base stays as it was"


@pytest.mark.long
def test_revisions_mixed_in_one_call_answer_as_each_does_alone(model, tmp_path):
    with (
        mint.open(tmp_path / "catalog", create=True) as store,
        mint.open(tmp_path / "other", create=True) as other,
    ):
        for name, rank in (("a", 2), ("b", 2), ("c", 9)):
            policy = model.policy(name, rank, learning_rate=3e-2)
            for _ in range(2):
                policy.train_step(ROWS if name != "b" else ROWS[::-1][:1])
            policy.save(store)
        a, b, c = (store[name] for name in "abc")
        each = [a, None, b, c, a]
        mixed = model.completions(["3 + 4 ="] * 5, each, slots=1, max_tokens=6)
        assert [completions[0].revision for completions in mixed] == [
            one and one.digest for one in each
        ]
        for one, [found] in zip(each, mixed):
            [[alone]] = model.completions(["3 + 4 ="], one, max_tokens=6)
            assert found.tokens == alone.tokens
            np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-5)
        with pytest.raises(mint.UserError, match="2 revisions are given for 1 prompts"):
            model.completions(["3"], [a, b])
        model.policy("d").save(other)
        with pytest.raises(mint.UserError, match="from 2 catalogs"):
            model.completions(["3", "4"], [a, other["d"]])


def test_a_shipped_config_is_read_as_launch_reads_it_with_settings_changed():
    configs = Path(__file__).parents[1] / "configs"
    read = mint.read_config(f"{configs}/quickstart.py:ci", steps=3, mesh={"data": 1})
    file = settings.build(*launch.load(f"{configs}/quickstart.py:ci"))
    mesh = dataclasses.replace(file.mesh, data=1)
    assert read == dataclasses.replace(file, steps=3, mesh=mesh)
    for setting, value, message in (("stpes", 3, "stpes"), ("steps", "three", "whole number")):
        with pytest.raises(mint.UserError, match=message):
            mint.read_config(configs / "tiny/sft.py", **{setting: value})
