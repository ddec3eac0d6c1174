"""The host: settings of its process, made once at start-up, and its memory."""

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
    """Makes glibc keep freed memory instead of returning it to the kernel.

    XLA on CPU allocates and frees its temporaries (over 1 GB in a training step) in every call;
    returned to the kernel they cost a page fault for each 4 KiB of the next call. Does nothing but
    return False outside Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
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
    """Returns to the kernel what ``keep_freed_memory`` keeps; False where there is no glibc.

    To be called between phases of different sizes: holes that one leaves do not fit the other's
    temporaries, and the heap grows by both. GRPO of eight policies on SmolLM2-135M held 2.2 to 2.4
    GB in its update, more in each step, and 1.9 so; the update takes a tenth longer, for its pages
    are faulted in again.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return False
    return True


def run_in_the_calling_thread() -> None:
    """Has a CPU's programs run in the thread that calls them; before JAX looks for devices.

    In a thread of JAX's own they free their temporaries when that thread comes to it, up to 3 ms
    after their results are there: the next program's were then often taken beside them, and the
    heap kept both (78 MB in GRPO of eight policies on SmolLM2). It costs nothing, for whoever runs
    a program here waits for it: decoding and training took the same time. Programs over several
    devices are not concerned.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def leave_out_absent_tpu() -> None:
    """Has JAX not look for a TPU where only its compiler is installed.

    libtpu, which compiles for TPUs that are elsewhere, otherwise asks this machine for its own
    first: it prints its errors, and has been seen to wait twenty seconds for a metadata server.
    Does nothing where JAX_PLATFORMS says what to use, where a GPU's plugin is installed too, or
    where a device file may be a TPU's.
    """
    chosen: str = jax.config.jax_platforms  # type: ignore[attr-defined]
    if chosen or importlib.util.find_spec("libtpu") is None:
        return
    gpu = any(
        importlib.util.find_spec(name)
        for name in ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin")
    )
    if not gpu and not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*")):
        jax.config.update("jax_platforms", "cpu")


def threads_for_simulated_devices() -> int | None:
    """Gives XLA's CPU client more threads than simulated devices; returns how many it sets, None
    where there is one device or it is said.

    Every collective holds a thread of the client's pool until all its devices have come, and a
    device may wait in two at once, for independent ones of two mesh axes take any order. XLA has a
    thread a device where cores are fewer: eight devices on two cores stood still for good in a
    training step over expert=4 x tensor=2 (two all-reduces and six all-gathers held all eight
    threads).
    """
    # the last one counts
    found = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    devices = int(found[-1]) if found else jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if devices <= 1 or "NPROC" in os.environ or "PJRT_NPROC" in os.environ:
        return None
    threads = max(4 * devices, os.cpu_count() or 1)
    os.environ["PJRT_NPROC"] = str(threads)
    return threads


def use_compilation_cache(directory: str | Path) -> None:
    """Keeps compiled programs on disk, so that a second run starts at once.

    On GPUs JAX keeps XLA's measurements of fusions below the same directory: programs that are not
    there yet are compiled without measuring what others have measured.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


_abandoned: list[threading.Thread] = []


def may_abandon(thread: threading.Thread) -> None:
    """Lets the process end while this daemon thread compiles or loads, see ``leave``."""
    _abandoned.append(thread)


def is_abandoning() -> bool:
    """Whether a thread that ``may_abandon`` named still runs."""
    return any(thread.is_alive() for thread in _abandoned)


def leave(status: int) -> None:
    """Ends the process where it would abandon a thread; returns elsewhere, for an ordinary end.

    An ordinary end waits for what XLA compiles, and then aborts: a daemon thread that asks for the
    GIL of an interpreter that is gone is ended by an exception that unwinds C++ frames (exit code
    134 after 18 s).
    """
    if is_abandoning():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def keep_stdout() -> None:
    """Keeps native libraries off stdout, which belongs to the result: gloo, for one, reports every
    connection there.
    """
    sys.stdout.flush()
    mine = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(mine, "w", buffering=1)


def rss_bytes() -> int:
    """Resident memory of this process now."""
    import psutil

    return psutil.Process(os.getpid()).memory_info().rss


def peak_rss_bytes() -> int:
    """The most resident memory this process has had, since its start or the last
    ``reset_peak_rss``.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def reset_peak_rss() -> bool:
    """Starts ``peak_rss_bytes`` anew; False where the system has no such switch (all but Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
