"""Settings of the process, made in processes of their own."""

import glob
import importlib.util
import os
import platform
import subprocess
import sys

import pytest


def started(code: str, unset: tuple[str, ...], changes: dict) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command, environment = [sys.executable, "-c", code], environment | changes
    return subprocess.run(command, capture_output=True, text=True, env=environment)


GIVEN = """
import ctypes
from mint_jax import host
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
host.keep_freed_memory()
blocks = [libc.malloc(32 << 20) for _ in range(3)]
for block in blocks:
    ctypes.memset(block, 1, 32 << 20)
held = host.rss_bytes()
libc.free(blocks[1])  # between the others: no end of the heap to be cut off
print(held, host.rss_bytes(), host.give_back_freed_memory(), host.rss_bytes())
"""  # noqa: E501


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_holes_of_the_heap_are_given_back():
    # what takes a second to compile is kept
    users = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    held, freed, given, after = started(GIVEN, (), users).stdout.split()
    assert given == "True"
    assert int(freed) > int(held) - (4 << 20), "it was kept"
    assert int(after) < int(held) - (28 << 20)


ASK = """
import sys
from mint_jax import host
import jax
host.leave_out_absent_tpu()
print(jax.devices()[0].platform, jax.config.jax_platforms)
"""


ACCELERATORS = (
    glob.glob("/dev/accel*")
    or glob.glob("/dev/vfio/[0-9]*")
    or importlib.util.find_spec("jax_cuda13_plugin")
)


@pytest.mark.skipif(
    bool(ACCELERATORS), reason="this machine has an accelerator, or a plugin that looks for one"
)
@pytest.mark.parametrize("chosen", ["", "cpu"])
def test_a_tpus_compiler_alone_is_not_asked_for_a_tpu(chosen):
    assert importlib.util.find_spec("libtpu"), "the tests' set-up has it"
    done = started(ASK, ("JAX_PLATFORMS",), {"JAX_PLATFORMS": chosen} if chosen else {})
    assert (done.returncode, done.stdout.split()) == (0, ["cpu", "cpu"])
    assert "libtpu" not in done.stderr, "what it says when it looks for a TPU"
