"""The CPU kernels are compiled once for a machine, and hold with narrower vectors."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pallas_kernels import native

FILES = ("blocks", "draw", "layer_matmul", "paged", "slot_lora", "state_step")


@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86")
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx"])
def test_kernels_hold_with_narrower_vectors(without, tmp_path):
    env = os.environ | {"CXX": f"c++ {without}", "MINT_JAX_CACHE": str(tmp_path)}
    files = [f"tests/pallas_kernels/{name}_test.py" for name in FILES]
    which = "(float64 or ggml or row_s_bits) and not tpu and not gpu and not xla"
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command = [*pytest_, "-k", which, *files]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_kernels_are_compiled_once_for_these_sources_and_flags(tmp_path, monkeypatch):
    """By a compiler that only notes its calls."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    write = 'sleep 0.1; while [ $# -gt 1 ]; do [ "$1" = -o ] && touch "$2"; shift; done; true'
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{write}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MINT_JAX_CACHE", str(tmp_path / "cache"))

    def compilations():
        return sum(" -c " in line for line in log.read_text().splitlines())

    with ThreadPoolExecutor() as pool:
        [made] = {built.result() for built in [pool.submit(native._built) for _ in range(4)]}
    assert made.is_file()
    assert native._built() == made
    assert compilations() == len(native.SOURCES)
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DOTHER"))
    assert native._built() != made
    assert compilations() == 2 * len(native.SOURCES)
