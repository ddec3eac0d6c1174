"""Lists the test files that changes since a commit can affect, the nearest first.

    python -m tests.changed [COMMIT]    `make test-changed SINCE=COMMIT` runs them, long ones too

A test file is affected if it reaches a changed file over imports (those inside functions too), over
strings that name a module or a file of the checkout, or over a conftest.py. A file that is no
Python counts as part of its folder's modules. The distance is the number of such steps.
"""

import ast
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

ROOTS = ("mint_jax", "pallas_kernels", "benchmarks", "tests", "configs", "launch", "notebooks")
FOLDERS = ("docs", "launch", "notebooks", ".ci")  # a test that names one depends on all in it
EVERYWHERE = ("pyproject.toml", "constraints", "tests/compiled.py")


def graph(root: Path) -> dict[str, set[str]]:
    """Returns the files that each Python file of a checkout depends on, all relative to it."""
    files = [
        path.relative_to(root)
        for top in ROOTS
        for path in sorted((root / top).rglob("*.py"))
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    modules = {_module(path): str(path) for path in files}
    return {str(path): _dependencies(root, path, modules) for path in files}


def affected(root: Path, changed: Iterable[str]) -> list[str]:
    """Returns the test files that reach one of ``changed``, nearest first, then by name."""
    depends = graph(root)
    tests = [path for path in depends if Path(path).name.endswith("_test.py")]
    changed = [path for name in changed for path in _owners(name, depends)]
    if any(path.startswith(EVERYWHERE) for path in changed):
        return sorted(tests)
    users: dict[str, set[str]] = {}
    for path, needed in depends.items():
        for other in needed:
            users.setdefault(other, set()).add(path)
    distance, queue = dict.fromkeys(changed, 0), deque(changed)
    while queue:
        path = queue.popleft()
        for user in users.get(path, ()):
            if user not in distance:
                distance[user] = distance[path] + 1
                queue.append(user)
    return sorted((p for p in tests if p in distance), key=lambda p: (distance[p], p))


def changed_since(root: Path, commit: str) -> list[str]:
    """Returns the files that differ from ``commit``, uncommitted and untracked ones included."""
    found: set[str] = set()
    for command in (f"diff --name-only {commit} --", "ls-files --others --exclude-standard"):
        done = subprocess.run(
            ["git", *command.split()], cwd=root, check=True, capture_output=True, text=True
        )
        found |= set(done.stdout.splitlines())
    return sorted(found)


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _dependencies(root: Path, path: Path, modules: dict[str, str]) -> set[str]:
    found: set[str] = set()
    package = _module(path) if path.name == "__init__.py" else _module(path.parent)

    def add(name: str) -> None:
        """Adds a module and the packages around it, which are imported first."""
        while name:
            if name in modules:
                found.add(modules[name])
            name = name.rpartition(".")[0]

    for node in ast.walk(ast.parse((root / path).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            up = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            base = ".".join(filter(None, (up if node.level else "", node.module)))
            for alias in node.names:
                add(f"{base}.{alias.name}")
        elif isinstance(node, ast.JoinedStr):  # f"mint_jax.recipes.{name}" may be any of them
            first = node.values[0] if node.values else None
            if isinstance(first, ast.Constant) and str(first.value).endswith("."):
                found |= {p for name, p in modules.items() if name.startswith(str(first.value))}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for word in node.value.split():
                add(word)
                name = word.rpartition("=")[2].partition(":")[0].removeprefix("./").strip("`'\",;")
                folder = name in FOLDERS and path.parts[0] == "tests"
                if len(name) < 200 and (folder or (root / name).is_file()):
                    found.add(name)
    if path.parts[0] == "tests":
        around = (parent / "conftest.py" for parent in path.parents)
        found |= {str(file) for file in around if (root / file).is_file()}
    return found - {str(path)}


def _owners(name: str, depends: dict[str, set[str]]) -> list[str]:
    """Returns the graph's nodes for a changed file: itself, a folder that tests read whole, and for
    a file other than Python the modules of the nearest folder that has any.
    """
    top = Path(name).parts[0]
    owners = [name, top] if top in FOLDERS else [name]
    if name.endswith(".py"):
        return owners
    for folder in Path(name).parents[:-1]:
        if modules := [path for path in depends if Path(path).parent == folder]:
            return [*owners, *modules]
    return owners


if __name__ == "__main__":
    here = Path(__file__).parents[1]
    print("\n".join(affected(here, changed_since(here, *sys.argv[1:] or ["HEAD"]))))
