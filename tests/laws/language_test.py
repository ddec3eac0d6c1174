"""The code keeps plain English: docstrings that say what a thing is, no retired words, and one
class for one name in the whole package.
"""

import ast
import collections
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ["benchmarks", "launch", "mint_jax", "pallas_kernels"]
PAGES = ["*.md", "launch/README.md", "docs/*.md", "notebooks/*.ipynb"]
OPENING = re.compile(r"(What|Who|Whose|Whom|Whether|Of|How|Where|When|Why|Which|As)\b")
PROSE = re.compile(
    r"\b(told|hear|heard|obeys?|obeyed|anew|for ever|mend(s|ed)?|dearest|begun|whence|beside"
    r"|lets? (it |them )?go of|let go|wherein|so many)\b",
    re.IGNORECASE,
)
NAMES = """
    told seen under mine heard obey obeys let_go why_not are held owned asking growing beside
"""
# class names that two rooms still share
SHARED = """
    Answer Checkpoint Checkpoints Cost Evaluation Load Message Model Named NotFound Plan Program
    Session Snapshot Source Store Tokens
"""


def problems(text: str, where: str = "") -> Iterator[str]:
    """``file:line: complaint`` for a Python source."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node) or ""
            if OPENING.match(doc):
                yield f"{where}:{node.body[0].lineno}: a docstring opens with {doc[:30]!r}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from _retired(node.value, where, node.lineno)
        if (name := _defined(node)).strip("_").lower() in NAMES.split():
            yield f"{where}:{node.lineno}: the name {name!r}"  # type: ignore[attr-defined]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _retired(token.string, where, token.start[0])


def _defined(node: ast.AST) -> str:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            return name
    return ""


def _retired(text: str, where: str, line: int) -> Iterator[str]:
    for word in PROSE.finditer(text):
        yield f"{where}:{line + text[: word.start()].count(chr(10))}: the word {word[0]!r}"


def prose_of(path: Path) -> str:
    """Text of a page with its lines in place; code and generated tables are left blank."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    made = re.compile(r"^```.*?^```$|<!-- figures.*?<!-- /figures -->|`[^`\n]*`", re.M | re.S)
    return made.sub(lambda found: "\n" * found[0].count("\n"), text)


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class name -> ``file:line`` of its definitions, where there are several."""
    found = collections.defaultdict(list)
    for where, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{where}:{node.lineno}")
    return {name: places for name, places in found.items() if len(places) > 1}


def test_code_and_pages_speak_plainly():
    found = []
    for room in ROOMS:
        files = sorted((ROOT / room).rglob("*.py"))
        assert files, room
        for file in files:
            found += problems(file.read_text(), str(file.relative_to(ROOT)))
    for page in PAGES:
        files = sorted(ROOT.glob(page))
        assert files, page
        for file in files:
            found += _retired(prose_of(file), str(file.relative_to(ROOT)), 1)
    assert not found, "\n".join(found)


def test_a_class_name_is_unique_in_the_package():
    assert shared_names({"a": "class A: ...", "b": "class A: ..."}) == {"A": ["a:1", "b:1"]}
    files = sorted((ROOT / "mint_jax").rglob("*.py"))
    shared = shared_names({str(file.relative_to(ROOT)): file.read_text() for file in files})
    new = {name: places for name, places in shared.items() if name not in SHARED.split()}
    assert not new, "\n".join(f"{name}: {', '.join(places)}" for name, places in new.items())
