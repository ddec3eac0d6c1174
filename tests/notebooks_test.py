"""The notebooks run from top to bottom, are stored with their outputs, and name what exists."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

from notebooks import store
from tests.docs_test import LINKED, NAMED

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def stored(request):
    """Path and contents of a notebook as it is committed."""
    return request.param, nbformat.read(request.param, as_version=4)


def test_a_notebook_is_stored_with_its_outputs(stored):
    """Those of the code above them, small, and without anything of the machine that made them."""
    path, notebook = stored
    assert notebook.metadata.get("code") == store.code_digest(notebook), (
        f"python notebooks/store.py {path.stem} runs it again"
    )
    assert path.stat().st_size < store.BYTES
    assert store.texts(notebook)
    assert len(store.pictures(notebook)) <= 1
    for cell in notebook.cells:
        for out in cell.get("outputs", ()):
            assert out.output_type in ("stream", "display_data"), "no errors, no values"
            assert out.get("name", "stdout") == "stdout"
    assert not [
        line
        for text in store.texts(notebook)
        for line in text.splitlines()
        if store.PRIVATE.search(line)
    ]


def test_what_a_notebook_names_exists(stored):
    """Links, files in backticks, other notebooks by number, and modules of commands."""
    path, notebook = stored
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    missing = [link for link in LINKED.findall(text) if not (path.parent / link).exists()]
    missing += [name for name in NAMED.findall(text) if not any(ROOT.glob(name.rstrip("/")))]
    missing += [
        n
        for n in re.findall(r"[Nn]otebook (\d\d)", text)
        if not any(one.name.startswith(n) for one in NOTEBOOKS)
    ]
    missing += [
        m
        for m in re.findall(r"python -m (mint_jax[\w.]*)", text)
        if importlib.util.find_spec(m) is None
    ]
    missing += [c for c in re.findall(r"--config=(\S+?\.py)", text) if not (ROOT / c).is_file()]
    assert not missing


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as its reader has
    assert store.texts(store.run(path)), "it prints its results; an error would end it"
