"""Settings of the process, made in processes of their own."""

import glob
import importlib.util
import os
import platform
import subprocess
import sys

import pytest


def run(code: str, *args) -> list[str]:
    # what takes a second to compile is kept
    users = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, env=users
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


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
    held, freed, given, after = run(GIVEN)
    assert given == "True"
    assert int(freed) > int(held) - (4 << 20), "it was kept"
    assert int(after) < int(held) - (28 << 20)


IN_TURN = """
import sys
import jax, jax.numpy as jnp
from mint_jax import host
if sys.argv[1] == "here":
    host.run_in_the_calling_thread()
x = jnp.ones((700, 700))
print(jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ x), x))(x).is_ready())
"""


def test_a_program_has_ended_when_its_call_returns():
    """One of a tenth of a second: in a thread of JAX's own it has not."""
    assert run(IN_TURN, "here") == ["True"]
    assert run(IN_TURN, "elsewhere") == ["False"]


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
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment |= {"JAX_PLATFORMS": chosen} if chosen else {}
    assert importlib.util.find_spec("libtpu"), "the tests' set-up has it"
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout.split()) == (0, ["cpu", "cpu"])
    assert "libtpu" not in done.stderr, "what it says when it looks for a TPU"


THREADS = """
from mint_jax import host
print(host.threads_for_simulated_devices())
import pathlib, jax, jax.numpy as jnp
jnp.ones(3).block_until_ready()
names = [p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen"))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="threads' names are read from /proc"
)
@pytest.mark.parametrize(
    ("flags", "others", "said"),
    [
        (
            "--xla_force_host_platform_device_count=2 --xla_force_host_platform_device_count=24",
            {},
            "96",
        ),
        ("--xla_force_host_platform_device_count=24", {"PJRT_NPROC": "31"}, "None"),
        ("", {}, "None"),
    ],
)
def test_simulated_devices_have_threads_to_wait_in(flags, others, said):
    """That they are enough is shown by what trains over meshes: isolation over expert=4 x tensor=2
    stood still with eight threads.
    """
    unset = ("NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
    environment = (
        {name: value for name, value in os.environ.items() if name not in unset}
        | {"XLA_FLAGS": flags}
        | others
    )
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    expected = {"96": "96", "None": others.get("PJRT_NPROC", str(os.cpu_count()))}[said]
    assert done.stdout.split() == [said, expected]
