"""The notebooks run from top to bottom as they are."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # one device, as its reader has
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()))
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in printed.splitlines() if line.startswith("step ")]
    gaps = [float(line.split("gap ")[1]) for line in printed.splitlines() if line.startswith("step ")]
    assert sum(rewards[-3:]) > sum(rewards[:3])  # it learns
    assert max(gaps) < 1e-3  # float32: the sampler's and the trainer's own order of summation
