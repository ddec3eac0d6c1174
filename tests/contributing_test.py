"""CONTRIBUTING's "A loss", followed to the letter in a copy of the repository, ends green."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEP = re.compile(
    r"^\d\. `([\w/.]+)`, in `(\w+)`.*?```python\n(.*?)\n *```", re.DOTALL | re.MULTILINE
)


def steps() -> list[tuple[str, str, str]]:
    """File, name of the table, and line to add."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## A loss\n")[1].split("\n## ")[0]
    return [(file, table, line.strip()) for file, table, line in STEP.findall(section)]


def followed(to: Path, lines: list[str], only: str) -> str:
    """What the tests of losses say in a copy with these lines."""
    for name in ("mint_jax", "pallas_kernels", "tests"):
        shutil.copytree(
            ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    shutil.copy(ROOT / "pyproject.toml", to)
    for (file, table, _), line in zip(steps(), lines, strict=True):
        text = (to / file).read_text()
        head = re.search(rf"^ *{table}(?:: [^=\n]+)? = {{[^\n]*\n", text, re.MULTILINE)
        assert head is not None, f"{file} has no {table}"
        (to / file).write_text(text[: head.end()] + f"    {line}\n" + text[head.end() :])
    env = os.environ | {"PYTHONPATH": str(to), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-p", "no:cacheprovider", "tests/train/losses_test.py", "-k", only]
    command = [sys.executable, "-m", "pytest", *options]
    ended = subprocess.run(command, cwd=to, env=env, capture_output=True, text=True, timeout=600)
    return ended.stdout + ended.stderr


@pytest.mark.long
def test_the_procedure_for_a_loss_ends_green_and_a_wrong_formula_does_not(tmp_path):
    found = steps()
    assert [Path(file).name for file, _, _ in found] == ["config.py", "losses.py", "losses_test.py"]
    kinds = len(
        re.findall(
            r'^    "\w+": frozenset', (ROOT / "mint_jax/train/config.py").read_text(), re.MULTILINE
        )
    )
    lines = [line for _, _, line in found]
    said = followed(tmp_path / "right", lines, "formula or they_read")
    assert f"\n{kinds + 2} passed" in said, said
    wrong = followed(
        tmp_path / "wrong", [lines[0], lines[1].replace("tanh", "sinh"), lines[2]], "squashed"
    )
    assert re.search(r"FAILED .*\[squashed\]", wrong), wrong
    unsaid = followed(
        tmp_path / "unsaid",
        [lines[0].replace('"advantages",', '"old_logp",'), *lines[1:]],
        "they_read",
    )
    assert "1 failed" in unsaid, unsaid
