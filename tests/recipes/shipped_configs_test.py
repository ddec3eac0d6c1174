"""Every config of a job runs: the small ones here, one after another as a user would, the others
for one step among the slow.
"""

import importlib
import json

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.recipes import RECIPES
from tests.laws.configs_trace_test import NAMES, load, pretrained  # noqa: F401 (a fixture)

SMALL = ("configs/tiny/sft.py", "configs/sample.py", "configs/score.py", "configs/evaluate.py")
TRAIN = [name for name in NAMES if load(name).job in ("grpo", "sft", "dpo")]
ELSEWHERE = (
    "scale_up",
    "serve",
    "pretrain",
)  # scale_up_test, …, and the others' base


def run(name, folder, *options):
    config = load(name, *options)
    return importlib.import_module(RECIPES[config.job]).run(config, folder)


def test_all_configs_are_run_somewhere():
    assert {name for name in NAMES if load(name).job not in ELSEWHERE} == {*SMALL, *TRAIN}


@pytest.mark.long
def test_what_training_leaves_is_sampled_scored_and_evaluated(tmp_path):
    catalog, base = f"--config.catalog={tmp_path / 'catalog'}", "--config.base=tiny-random"
    trained = run("configs/tiny/sft.py", tmp_path / "sft", catalog, "--config.steps=2")
    revision = next(p["revision"] for p in trained["policies"] if p["name"] == "adder")
    with Catalog.open(tmp_path / "catalog") as opened:
        opened.branch("again", "adder@latest")
    asked = tmp_path / "in.jsonl"
    asked.write_text(
        "".join(
            json.dumps({"prompt": "1 + 2 =", "adapter": adapter}) + "\n"
            for adapter in ("adder@latest", "again@latest")
        )
    )
    files = (f"--config.input={asked}", f"--config.output={tmp_path / 'out.jsonl'}")
    run(
        "configs/sample.py",
        tmp_path / "sample",
        base,
        catalog,
        *files,
        "--config.sampling.max_tokens=4",
        "--config.sampling.temperature=0.0",
    )
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["revision"] for row in rows] == [revision, revision]
    assert rows[0]["completions"] == rows[1]["completions"]
    asked.write_text(json.dumps({"text": "1 + 2 = 3", "adapter": "again@latest"}) + "\n")
    files = (f"--config.input={asked}", f"--config.output={tmp_path / 'scores.jsonl'}")
    assert run("configs/score.py", tmp_path / "score", base, catalog, *files)["sequences"] == 1
    few = (
        "--config.examples=2",
        "--config.samples=1",
        "--config.adapters.policy=again@latest",
        "--config.sampling.max_tokens=4",
    )
    assert run("configs/evaluate.py", tmp_path / "evaluate", base, catalog, *few)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAIN)
def test_every_training_config_takes_a_step(name, pretrained, tmp_path):  # noqa: F811
    options = ["--config.steps=1"]
    if load(name).base == "runs/tiny/pretrain_moe/base":
        options.append(f"--config.base={pretrained}")
    if load(name).job == "grpo":
        options += ["--config.eval.examples=2", "--config.eval.samples=1"]
    result = run(name, tmp_path, *options)
    assert all(policy["revision"] for policy in result["policies"])
