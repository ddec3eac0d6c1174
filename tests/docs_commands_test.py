"""The commands of README and docs, run as they stand there, on a base of random weights and for
fewer steps.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import peft
import pytest
import torch

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from mint_jax.envs import env as env_lib
from mint_jax.lora import tree
from mint_jax.lora.config import AdapterConfig
from mint_jax.models import layout, outline
from tests import oracles
from tests.recipes.serve_test import served

ROOT = Path(__file__).parents[1]
PYTHON = {".venv/bin/python": sys.executable}
BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
SMALLER = {
    "smollm2-135m-instruct": "tiny-random",
    '"steps": 20': '"steps": 2',
    ".venv/bin/python": sys.executable,
}


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def blocks(page: str, smaller: dict[str, str] = SMALLER) -> list[tuple[str, str]]:
    """(what stands behind the fence, text) of each fenced block, with less to do."""
    text = (ROOT / page).read_text()
    for long, short in smaller.items():
        assert long in text, f"{page} has no {long!r}"
        text = text.replace(long, short)
    return [(found["kind"], found["text"]) for found in BLOCK.finditer(text)]


def commands_of(page: str, number: int = 0) -> str:
    """One fenced block of commands, with the tiny base in place of the packaged one."""
    text = [text for kind, text in blocks(page, {}) if kind == "bash"][number]
    for long, short in ({"smollm2-135m-instruct": "tiny-random"} | PYTHON).items():
        text = text.replace(long, short)
    return text


def bash(text: str, folder: Path, shell: str = "bash") -> str:
    """What the commands print, all of which succeed."""
    done = subprocess.run(
        [shell, "-e"], input=text, cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
def test_an_own_task_from_nothing_to_an_adapter_that_peft_loads(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    commands = 0
    for kind, text in blocks("docs/own_task.md"):
        if named := re.search(r'title="(.*)"', kind):
            (tmp_path / named[1]).write_text(text)
            continue
        for command in text.splitlines():
            tiny = " --config.base=tiny-random" if "mint_jax.launch" in command else ""
            tiny += " --config.steps=2" * ("conversation" in command)
            bash(command + tiny, tmp_path)
            commands += 1
    assert commands == 8
    monkeypatch.syspath_prepend(tmp_path)
    products = env_lib.make("products:make")
    first = products.train[0]
    assert products.reward(f"```python\nprint({first.answer})\n```", first) == 1.0
    for name, turns, reward in (
        ("guess:make", ["0", " 3"], 1.0),
        ("calculator:make", ["```python\nprint(9 * 37)\n```", "it is 333"], 1.0),
    ):
        task = env_lib.make(name)
        example = next(e for e in (*task.train, *task.held_out) if e.answer in ("3", "333"))
        first = task.step(turns[:1], example)
        assert example.answer in first.observation[0]["content"]
        assert task.step(turns, example) == env_lib.StepResult(reward=reward, done=True)
    with Catalog.open(tmp_path / "runs/mine") as catalog:
        first, *later = catalog.revisions("parity")
        assert first.origin.startswith("import of")
        assert later, "training went on from what was imported"
    assert (tmp_path / "runs" / "parity" / "rewards.png").is_file()
    policy, base = (
        json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()
    )
    assert policy["revision"] and not base["revision"]  # noqa: PT018

    for rows, config in (("rows.jsonl", "sft"), ("pairs.jsonl", "dpo")):
        settings = f"--config.policies.*.data.path={rows} --config.policies.*.data.env="
        bash(
            f"{sys.executable} -m mint_jax.launch --config=configs/tiny/{config}.py"
            f" --workdir={config} {settings} --config.steps=1",
            tmp_path,
        )

    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "parity-peft")
    assert sum(name.endswith("lora_A.default.weight") for name, _ in model.named_parameters()) > 0
    with torch.no_grad():
        assert np.isfinite(oracles.torch_logits(model, np.array([[1, 2, 3]]))).all()


# a machine need not have all
SHELLS = [name for name in ("bash", "dash", "zsh") if shutil.which(name)]


@pytest.mark.long
def test_the_commands_of_the_readme_and_the_index_on_the_quickstarts_output(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    (made / "configs").symlink_to(ROOT / "configs")
    settings = (
        "--config.base=tiny-random --config.steps=3 --config.export_every=1"
        " --config.eval.examples=4"
    )
    bash(
        f"{sys.executable} -m mint_jax.launch --config=configs/quickstart.py"
        f" --workdir=runs/quickstart {settings}",
        made,
    )
    for shell in SHELLS:
        folder = tmp_path / shell
        shutil.copytree(made, folder, symlinks=True)
        tiny = ("max_tokens=6", "max_tokens=6 --config.base=tiny-random")
        bash(commands_of("README.md", 1).replace(*tiny), folder, shell)
        [answer] = (json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines())
        with Catalog.open(folder / "runs/quickstart/catalog") as catalog:
            moves = [entry.action for entry in catalog.audit("adder", alias="serving")]
            assert moves == ["promote", "promote", "rollback"]
            assert answer["revision"] == catalog.resolve("adder@2").digest
        assert (folder / "runs/adder-peft/adapter_config.json").is_file()
    for change in ("", ":stored --config.policies.*.data.min_reward=0"):
        bash(
            f"{sys.executable} -m mint_jax.launch --config=configs/distill.py{change}"
            f" --workdir=runs/distill{change[:7]} --config.base=tiny-random --config.steps=1",
            made,
        )
    listed = commands_of("docs/index.md").replace("make quickstart\n", "")
    assert "adder" in bash(listed, made)


@pytest.mark.long
def test_the_commands_of_the_catalogs_page(tmp_path, rng):
    base = outline.outline("tiny-random")
    with Catalog.open(tmp_path / "runs/catalog") as catalog:
        for step in range(2):
            config = AdapterConfig(2, 4.0, ("q", "v"))
            data = jax.tree.map(
                lambda s: rng.normal(0, 0.02, s.shape).astype(np.float32),
                tree.adapter_specs(base.specs, config),
            )
            catalog.export("chat", pack(data, Schema(base.fingerprint, config)), step, create=True)
        catalog.promote("chat", 2)
    bash(
        f"{sys.executable} -m mint_jax.catalog --catalog=runs/catalog export chat@1 ADAPTERS/other"
        " --base=tiny-random",
        tmp_path,
    )
    bash(commands_of("docs/catalog.md"), tmp_path)
    with Catalog.open(tmp_path / "runs/catalog") as catalog:
        assert [one.policy for one in catalog.policies()] == ["chat", "other"]
        assert catalog.resolve("other").digest == catalog.resolve("chat@1").digest
        assert catalog.resolve("chat@serving").number == 2
    assert (tmp_path / "OUT/adapter_config.json").is_file()


@pytest.mark.long
def test_the_examples_of_the_services_page(tmp_path):
    """The official clients and curl, as they stand there, against the server of a smaller base."""
    pages = blocks("docs/service.md", {"smollm2-135m-instruct": "tiny-random"})
    server = served(tmp_path / "serve", ranks="(32,)")
    try:
        url = server.ready()
        code = "\n".join(text for kind, text in pages if kind == "python")
        (tmp_path / "code.py").write_text(code.replace("http://127.0.0.1:8000", url))
        out = bash(f"TINKER_TELEMETRY=0 {sys.executable} code.py", tmp_path)
        assert "grad_norm" in out
        [_, curls] = [text for kind, text in pages if kind == "bash"]
        curls = curls.replace("http://127.0.0.1:8000", url).replace("curl -s", "curl -sf")
        out = bash(curls, tmp_path)
        assert '"text_completion"' in out
        assert "mint_http_requests_total" in out
    finally:
        server.stop()


@pytest.mark.long
def test_the_canary_of_the_page_on_what_is_beyond(tmp_path, rng):
    base, config = outline.outline("tiny-random"), AdapterConfig(2, 4.0, ("q", "v"))
    with Catalog.open(tmp_path / "runs/serve/catalog") as catalog:
        for step in range(2):
            specs = tree.adapter_specs(base.specs, config)
            data = jax.tree.map(lambda s: rng.normal(0, 0.02, s.shape).astype(np.float32), specs)
            catalog.export("adder", pack(data, Schema(base.fingerprint, config)), step, create=True)
    bash(commands_of("docs/beyond.md"), tmp_path)
    assert "relative_error" in bash(commands_of("docs/beyond.md", 1), tmp_path)
    server = served(tmp_path / "runs/serve", ranks="(2,)", routing="True")
    try:
        texts = [text for kind, text in blocks("docs/beyond.md", {}) if kind == "python"]
        url, shown = server.ready(), []
        for code in texts:
            (tmp_path / "code.py").write_text(code.replace("http://127.0.0.1:8000", url))
            shown.append(bash(f"{sys.executable} code.py", tmp_path))
        canary, route = shown
        assert "'state': 'open'" in canary
        assert "'object': 'route'" in route
        assert "adder@" in route
    finally:
        server.stop()
    with Catalog.open(tmp_path / "runs/serve/catalog") as catalog:
        [canary] = catalog.canaries("adder")
        assert (canary.share, canary.margin, sum(canary.evidence.answers)) == (0.05, 0.02, 1)


@pytest.mark.long
def test_the_lineage_of_the_recipes_page(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for command in commands_of("docs/recipes.md").splitlines():
        is_stage = "lineage.py" in command
        tiny = " --config.base=tiny-random" * ("mint_jax.launch" in command)
        tiny += " --config.steps=1" * is_stage + " --config.examples=4" * ("evaluate" in command)
        shown = bash(command + tiny, tmp_path)
    assert "json_fields" in shown, "the last command shows the evaluation"
    with Catalog.open(tmp_path / "runs/lineage/catalog") as catalog:
        schemas = {n: catalog.policy(n).schema for n in ("extractor", "student")}
        made = [
            (Schema.from_json(s).config.rank, len(catalog.revisions(n))) for n, s in schemas.items()
        ]
    assert made == [(64, 3), (4, 1)]


@pytest.mark.long
def test_the_commands_of_the_sweeps_page(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    bash(commands_of("docs/sweeps.md"), tmp_path)
    assert (tmp_path / "runs/sweeps/ci/cold_staircase/report.md").is_file()


def test_the_conversion_of_the_pods_page(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    command = commands_of("docs/pods.md").strip()
    bash(f"{command} --config.base=tiny-random", tmp_path)
    assert layout.is_converted(tmp_path / "runs" / "converted")


@pytest.mark.slow  # minutes: a real base compiled for four chips
def test_the_pod_of_the_pods_page(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    bash(commands_of("docs/pods.md", 1), tmp_path)


def test_every_command_on_a_page_is_run_by_a_test():
    """Blocks by page: run above, by api_test.py (Python), fleet/ray_test.py, or by CI (make)."""
    known = {"README.md": 2} | {
        f"docs/{name}.md": 1 for name in ("index", "catalog", "fleet", "recipes", "sweeps")
    }
    known |= {"docs/beyond.md": 2, "docs/own_task.md": 4, "docs/pods.md": 2, "docs/service.md": 2}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = {}
    for page in pages:
        blocks = [one for one in BLOCK.finditer(page.read_text()) if one["kind"] == "bash"]
        if blocks:
            found[str(page.relative_to(ROOT))] = len(blocks)
    assert found == known
    makes = (ROOT / "CONTRIBUTING.md").read_text() + commands_of("README.md")
    targets = set(re.findall(r"(?:^|`)make ([\w-]+)", makes, re.M))
    assert len(targets) > 8
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
