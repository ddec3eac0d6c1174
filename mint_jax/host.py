"""Host settings of the process, made once at start-up, and its memory."""

import ctypes
import glob
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path

import jax

# mallopt parameters, from malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory instead of returning it to the kernel; false without glibc."""
    # XLA on CPU allocates and frees its temporaries (over 1 GB in a training step) in every call.
    # Returned to the kernel, they cost a page fault per 4 KiB of the next call.
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 64 << 20),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def give_back_freed_memory() -> bool:
    """Returns the memory of ``keep_freed_memory`` to the kernel; false without glibc.

    Call it between phases of different sizes: one phase's holes do not fit the other's temporaries.
    GRPO of eight policies on SmolLM2-135M had 2.4 GB in its update, growing each step, and 1.9 GB
    with this call; the update takes a tenth longer, since its pages fault again.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return False
    return True


def run_in_the_calling_thread() -> None:
    """Runs CPU programs in the calling thread; call it before JAX looks for devices.

    In JAX's own thread a program frees its temporaries up to 3 ms after its results. The next
    program then allocated new ones, and the heap kept both (78 MB in GRPO of eight policies on
    SmolLM2). Programs over several devices are not affected.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def leave_out_absent_tpu() -> None:
    """Keeps JAX from looking for a TPU where only the TPU compiler is installed.

    libtpu would probe this machine first, print errors, and sometimes wait twenty seconds for a
    metadata server. Does nothing if JAX_PLATFORMS is set, a GPU plugin is installed, or a device
    file may be a TPU's.
    """
    chosen: str = jax.config.jax_platforms  # type: ignore[attr-defined]
    if chosen or importlib.util.find_spec("libtpu") is None:
        return
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin")
    devices = ("/dev/accel*", "/dev/vfio/[0-9]*")
    if not any(map(importlib.util.find_spec, plugins)) and not any(map(glob.glob, devices)):
        jax.config.update("jax_platforms", "cpu")


def threads_for_simulated_devices() -> int | None:
    """Gives XLA's CPU client more threads than simulated devices; returns the number, or None if
    there is one device or the user set it.

    Every collective blocks a thread until all its devices arrive, and a device may wait in two at
    once. XLA has one thread per device on few cores: eight devices on two cores deadlocked in a
    training step over expert=4 x tensor=2.
    """
    flag, flags = r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    found = re.findall(flag, flags)  # the last one wins
    devices = int(found[-1]) if found else jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if devices <= 1 or "NPROC" in os.environ or "PJRT_NPROC" in os.environ:
        return None
    threads = max(4 * devices, os.cpu_count() or 1)
    os.environ["PJRT_NPROC"] = str(threads)
    return threads


def use_compilation_cache(directory: str | Path) -> None:
    """Caches compiled programs on disk, so that a second run starts at once.

    On GPUs JAX also caches XLA's measurements of fusions there, so new programs reuse them.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


_abandoned: list[threading.Thread] = []


def may_abandon(thread: threading.Thread) -> None:
    """Lets the process end while this daemon thread compiles or loads; see ``leave``."""
    _abandoned.append(thread)


def is_abandoning() -> bool:
    """Returns true while a thread given to ``may_abandon`` runs."""
    return any(thread.is_alive() for thread in _abandoned)


def leave(status: int) -> None:
    """Ends the process at once if a thread would be abandoned; otherwise returns.

    A normal exit waits for XLA's compilation and then aborts: a daemon thread that asks for the GIL
    of a finalised interpreter is unwound through C++ frames (exit code 134 after 18 s).
    """
    if is_abandoning():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def keep_stdout() -> None:
    """Keeps native libraries, such as gloo, off stdout, which is for the result."""
    sys.stdout.flush()
    result = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(result, "w", buffering=1)


def rss_bytes() -> int:
    """Returns the resident memory of this process."""
    import psutil

    return psutil.Process(os.getpid()).memory_info().rss


def peak_rss_bytes() -> int:
    """Returns the peak resident memory since the start or the last ``reset_peak_rss``."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> bool:
    """Resets ``peak_rss_bytes``; returns false outside Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
