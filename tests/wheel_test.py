"""A wheel, installed where there is no checkout: the package is whole, and finds the shipped
configs.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("mint_jax", "pallas_kernels", "configs", "pyproject.toml", "README.md", "LICENSE")


def run(*command, cwd, **options) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-3000:] or done.stdout[-3000:]
    return done.stdout


@pytest.mark.long
def test_a_wheel_trains_outside_the_repository(tmp_path):
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=elsewhere)
    # its dependencies are those of this environment, whose own mint_jax is a checkout that this
    # does not show
    hidden = ("PYTHONPATH", "XLA_FLAGS")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here = run(python, "-c", purelib, cwd=elsewhere).strip()
    (Path(here) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import mint_jax; print(mint_jax.__file__)", cwd=elsewhere, env=env)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    assert not (Path(here) / "benchmarks").exists()
    console = ROOT / "mint_jax" / "service" / "console"
    parts = [
        *(ROOT / "mint_jax").rglob("*.py"),
        *console.glob("templates/*"),
        *console.glob("static/*"),
        *(ROOT / "pallas_kernels" / "native").glob("*.[ch]*"),
        *(ROOT / "pallas_kernels").glob("*/tuned/*.json"),
    ]
    lacking = [p for p in parts if not (Path(here) / p.relative_to(ROOT)).is_file()]
    assert not lacking
    launch = (python, "-m", "mint_jax.launch", "--config=configs/tiny/sft.py", "--workdir=work")
    run(*launch, "--config.steps=1", cwd=elsewhere, env=env)
    listing = (python, "-m", "mint_jax.catalog", "--catalog=work/catalog", "ls", "--json")
    listed = run(*listing, cwd=elsewhere, env=env)
    assert '"adder"' in listed
