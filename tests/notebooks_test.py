"""The notebooks run from top to bottom as they are."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def it_learns(lines: list[str]) -> None:
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in lines if line.startswith("step ")]
    gaps = [float(line.split("gap ")[1]) for line in lines if line.startswith("step ")]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert max(gaps) < 1e-3  # float32: the sampler's and the trainer's own order of summation


def it_serves_what_the_names_say(lines: list[str]) -> None:
    alias = dict(line.split(" is ") for line in lines if line.startswith("customer-7@") and " is " in line)
    served = {words[0]: words[1] for line in lines if (words := line.split())[1:] and re.fullmatch("[0-9a-f]{12}", words[1])}
    assert alias["customer-7@latest"] == alias["customer-7@2"] != alias["customer-7@serving"]
    assert len(set(served.values())) == len(served) == 11
    assert alias["customer-7@serving"] == served["customer-7@serving"]
    assert alias["customer-7@latest"] == served["customer-7@latest"]
    assert "damaged: []" in lines
    assert [line.split(" - ")[0] for line in lines if line.startswith("damaged: customer")] == ["damaged: customer-7@2"]
    assert any("no alias 'canary'" in line for line in lines)
    assert "removed ['customer-7@2'] kept [1, 3]" in lines


CHECKS = {"01_one_base_two_policies": it_learns, "02_a_population_of_policies": it_serves_what_the_names_say}


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # one device, as its reader has
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    CHECKS[path.stem]("".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ())).splitlines())
