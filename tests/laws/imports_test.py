"""Imports point one way: down the list of levels; names on one level stay strangers, except inside
a folder and among root files.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOT_FILES = {"params", "sharding", "mesh", "checkpoint", "multihost", "messages", "metrics"}
ROOT_FILES |= {"trackers", "compiling", "data", "host", "digest", "stamp", "nested", "ordered"}
ROOT_FILES |= {"safetensors_header", "interrupts"}
LEVELS = [
    {"api"},
    {"launch", "top", "audit"},
    {"recipes"},
    {"fleet"},
    {"aot"},
    {"harness"},
    {"service"},
    {"train", "rollout", "catalog", "residency", "routing", "envs"},
    {"models"},
    {"lora"},
    ROOT_FILES,
    {"errors", "fields", "files"},  # all may raise a UserError, and write a file
]
ONLY_IN = {  # optional packages, and what only one place may know
    "torch": (),
    "transformers": (),
    "peft": (),
    "aiohttp": "fleet/",
    "starlette": ("fleet/", "service/"),
    "pydantic": "service/",
    "jwt": "service/",
    "uvicorn": "service/",
    "google.protobuf": ("data/sentence_pieces.py", "service/wire/"),
    "pyrage": "service/external.py",
    "reasoning_gym": "envs/",
    "pyarrow": "data/sources.py",
    "huggingface_hub": "models/base.py",
    "faiss": "routing/index.py",
    "ray": ("fleet/", "recipes/fleet.py"),
    "gguf": "models/gguf.py",
    "llguidance": "rollout/grammar.py",
    "sqlalchemy": ("catalog/", "service/book.py"),
    "psycopg": "catalog/",
    "prometheus_client": ("fleet/", "residency/", "service/", "top.py"),
}
FILES = sorted((ROOT / "mint_jax").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, also inside functions and by name
    (``importlib``, registries).
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import: spell it out"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.match(r"mint_jax\.\w+(\.\w*)*(:\w+)?$", node.value)
        ):
            names.add(node.value.split(":")[0])
    return names


def part(module: str) -> str:
    """``mint_jax.train.step`` -> ``train``."""
    return module.split(".")[1]


def level(name: str) -> int:
    found = [i for i, names in enumerate(LEVELS) if name in names]
    assert found, f"mint_jax/{name} has no level: add it to LEVELS"
    return found[0]


def is_file(name: str) -> bool:
    return (ROOT / "mint_jax" / f"{name}.py").is_file()


def may_import(importer: str, target: str) -> bool:
    if importer == target:
        return True
    down = level(target) - level(importer)
    return down > 0 or (down == 0 and is_file(importer) and is_file(target))


def test_imports_of_mint_jax_point_down():
    assert len(FILES) > 40
    wrong = []
    for path in FILES:
        if path.name == "__init__.py" and path.parent.name == "mint_jax":
            continue
        mine = path.relative_to(ROOT / "mint_jax").with_suffix("").parts[0]
        for module in sorted(m for m in imported(path) if m.startswith("mint_jax.")):
            if not may_import(mine, part(module)):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_kernels_know_nothing_of_mint_jax_and_nobody_imports_benchmarks_configs_or_tests():
    for path in [*FILES, *sorted((ROOT / "pallas_kernels").rglob("*.py"))]:
        tops = {name.split(".")[0] for name in imported(path)}
        assert not tops & {"benchmarks", "configs", "tests"}, path
        if "pallas_kernels" in path.relative_to(ROOT).parts:
            assert "mint_jax" not in tops, path


def test_optional_packages_stay_where_they_are_needed():
    wrong = []
    for path in FILES:
        mine = path.relative_to(ROOT / "mint_jax").as_posix()
        for top in {name.split(".")[0] for name in imported(path)} & set(ONLY_IN):
            if not mine.startswith(ONLY_IN[top]):
                wrong.append(f"mint_jax/{mine} imports {top}, which belongs to {ONLY_IN[top]}")
    assert not wrong, "\n".join(wrong)
