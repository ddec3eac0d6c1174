"""Runs notebooks and stores them with their outputs: ``python notebooks/store.py [NAME...]``, all
by default.

Stored are what cells print on stdout and the notebook's last picture, small enough that a page of a
forge shows them at once. A digest of the code is kept too: a test compares it, so that outputs are
those of the code above them.
"""

import base64
import hashlib
import io
import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

HERE = Path(__file__).parent
WIDTH, COLOURS = 640, 48  # of the picture
LINES, BYTES = 40, 100_000  # of a cell's text; of a notebook
# an absolute path
PRIVATE = re.compile(r"(?<![\w:/.])/(?!api|v1|health|ready|metrics)\w[\w.-]*/\w")


def code_digest(notebook: nbformat.NotebookNode) -> str:
    """Identifies the code of all cells."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def pictures(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Outputs that are pictures."""
    return [
        out
        for cell in notebook.cells
        for out in cell.get("outputs", ())
        if "image/png" in out.get("data", {})
    ]


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What cells print, by output."""
    return [
        out.text
        for cell in notebook.cells
        for out in cell.get("outputs", ())
        if out.output_type == "stream"
    ]


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with all that its cells put out, on one CPU device, as its reader has."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.pop("XLA_FLAGS", None)
    nbclient.NotebookClient(
        notebook,
        timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    return notebook


def trim(notebook: nbformat.NotebookNode) -> None:
    """Leaves what is stored."""
    last = pictures(notebook)[-1:]
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of this run
        if cell.cell_type != "code":
            continue
        kept = [
            out
            for out in cell.outputs
            if out in last or (out.output_type == "stream" and out.name == "stdout")
        ]
        for out in kept:
            if out.output_type == "stream":
                lines = out.text.splitlines()
                out.text = "\n".join(lines[:LINES] + ["…"] * (len(lines) > LINES)) + "\n"
            else:
                out.data = nbformat.NotebookNode({"image/png": _smaller(out.data["image/png"])})
                out.metadata = nbformat.NotebookNode()
        cell.outputs = kept
    notebook.metadata["code"] = code_digest(notebook)
    notebook.metadata["language_info"] = {"name": "python"}


def _smaller(png: str) -> str:
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.thumbnail((WIDTH, 2 * WIDTH), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    picture.quantize(COLOURS).save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def main(names: list[str]) -> None:
    for path in sorted(HERE.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = run(path)
        trim(notebook)
        if found := [
            line for text in texts(notebook) for line in text.splitlines() if PRIVATE.search(line)
        ]:
            raise SystemExit(f"{path.name} prints a path of this machine: {found[0]}")
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
