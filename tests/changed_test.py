"""The tests that a change can affect are found over imports, strings and folders."""

import subprocess

import pytest

from tests import changed

FILES = {
    "mint_jax/__init__.py": "",
    "mint_jax/low.py": "",
    "mint_jax/high.py": "def f():\n    from mint_jax import low\n",
    "mint_jax/recipes/sft.py": "from mint_jax.high import f\n",
    "mint_jax/launch.py": 'import importlib\nimportlib.import_module(f"mint_jax.recipes.{1}")\n',
    "pallas_kernels/native/door.py": "",
    "pallas_kernels/native/sum.cc": "",
    "configs/small.py": "",
    "docs/page.md": "",
    "tests/conftest.py": "import mint_jax.low\n",
    "tests/low_test.py": "from mint_jax.low import x\n",
    "tests/high_test.py": "from mint_jax import high\n",
    "tests/launch_test.py": 'RUN = "python -m mint_jax.launch --config=configs/small.py:ci"\n',
    "tests/native_test.py": "import pallas_kernels.native.door\n",
    "tests/docs_test.py": 'PAGES = ROOT / "docs"\n',
}
ALL = {name for name in FILES if name.endswith("_test.py")}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("mint_jax/high.py", {"tests/high_test.py", "tests/launch_test.py"}),
        ("mint_jax/recipes/sft.py", {"tests/launch_test.py"}),
        ("pallas_kernels/native/sum.cc", {"tests/native_test.py"}),
        ("configs/small.py", {"tests/launch_test.py"}),
        ("docs/page.md", {"tests/docs_test.py"}),
        ("tests/docs_test.py", {"tests/docs_test.py"}),
        ("tests/conftest.py", ALL),
        ("pyproject.toml", ALL),
        ("LICENSE", set()),
    ],
)
def test_a_change_affects_the_tests_that_reach_it(root, name, tests):
    assert set(changed.affected(root, [name])) == tests


def test_the_nearest_tests_come_first(root):
    assert changed.affected(root, ["mint_jax/high.py"])[0] == "tests/high_test.py"
    assert changed.affected(root, ["mint_jax/low.py"])[0] == "tests/low_test.py"


def test_changes_are_those_since_a_commit_and_those_not_committed(root):
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root))
    subprocess.run([*git, "init", "-q"], check=True)
    for message in ("first", "second"):
        (root / "mint_jax" / f"{message}.py").touch()
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", message], check=True)
    (root / "LICENSE").touch()
    (root / "mint_jax/low.py").write_text("x = 1\n")
    found = changed.changed_since(root, "HEAD~1")
    assert found == ["LICENSE", "mint_jax/low.py", "mint_jax/second.py"]
