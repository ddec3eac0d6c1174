"""The kernels for CPUs as processors with fewer kinds of vectors have them: their own tests,
compiled for those.
"""

import os
import platform
import subprocess
import sys

import pytest

FILES = ("blocks", "draw", "layer_matmul", "paged_attention", "slot_lora")


@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86")
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx"])
def test_kernels_hold_with_narrower_vectors(without, tmp_path):
    env = os.environ | {"CXX": f"c++ {without}", "MINT_JAX_CACHE": str(tmp_path)}
    files = [f"tests/pallas_kernels/{name}_test.py" for name in FILES]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not tpu and not gpu and not compiler",
        *files,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
