"""CPU kernels in C++, called through XLA's foreign functions, which read their inputs in place.

The first process that needs them compiles them for its processor with ``CXX``; without a compiler
XLA's forms run.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib

from pallas_kernels import cache

_HERE = Path(__file__).parent
# XLA's form of these ops copies its inputs first, and decoding is mostly reading. A step of
# SmolLM2-135M with eight adapters of rank 8 takes 4.59 / 2.36 / 1.69 times as long at 1 / 8 / 32
# rows without layer_matmul, 1.26 / 1.56 / 1.46 without paged_attention, 1.07 to 1.10 without
# slot_lora and 1.02 to 1.15 without draw (two cores, in turn, medians of 9).
OPS = ("layer_matmul", "block_matmul", "slot_lora", "paged_attention", "draw", "state_step")
SOURCES = tuple(f"{op}.cc" for op in OPS)
HEADERS = ("products.h", "threads.h", "vectors.h")
TARGETS = tuple(f"mint_{op}" for op in (*OPS, "block_unpack"))
# No -ffast-math: NaN must stay NaN, and sums keep their order. Fused operations are explicit
# (multiply_add): the compiler would fuse some loops and not others, and a row's bits would depend
# on the loop that computed it.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
FLAGS += ("-ffp-contract=off", "-w")
SECONDS = 300  # a compiler that takes longer is treated as hanging


def call(
    target: str,
    results: Any,
    *args: jax.Array,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """Calls one of ``TARGETS`` on arrays, as ``jax.ffi.ffi_call``."""
    require()
    made = jax.ffi.ffi_call(target, results, input_output_aliases=aliases or {})
    return made(*args, **attributes)


def require() -> None:
    """Compiles and registers the kernels, once; raises ``NotImplementedError`` if that fails."""
    # On an accelerator 19 s of compiling would be wasted.
    if (backend := jax.default_backend()) != "cpu":
        raise NotImplementedError(f"this process computes on a {backend}")
    why = _load()
    if why:
        raise NotImplementedError(why)


def require_one_device() -> None:
    """Raises NotImplementedError if XLA would partition a call over devices, which it cannot do."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes, manual = dict(mesh.shape).items(), mesh.manual_axes
    split = {name: size for name, size in sizes if size > 1 and name not in manual}
    if split:
        raise NotImplementedError(f"a mesh of {split} divides rows and matrices")


@functools.cache
def _load() -> str:
    """Registers the kernels; returns the reason if that fails, else an empty string."""
    try:
        library = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernels for CPUs were not compiled: {error}"
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return ""


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    raise OSError("no C++ compiler found: install g++ or clang++, or name one with CXX")


def _built() -> Path:
    """Returns the library for these sources, this compiler, this processor and this jaxlib."""
    compiler = shlex.split(_compiler())
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    darwin = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    command = [*compiler, *FLAGS, native, *darwin]
    about = [*command, jaxlib.__version__, platform.machine(), _processor()]
    about += [_run_command([*compiler, "--version"])]
    digest = hashlib.blake2b(digest_size=12)
    sources = ((_HERE / name).read_bytes() for name in (*SOURCES, *HEADERS))
    for part in (*map(str.encode, about), *sources):
        digest.update(len(part).to_bytes(8, "little") + part)
    made = cache.folder() / "native" / f"kernels-{digest.hexdigest()}.so"
    if made.is_file():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    # One process compiles, with all cores, and the others wait. The lock ends with its process.
    with (made.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            _compile(command, made)
    return made


def _compile(command: list[str], made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        whole = Path(folder) / "kernels.so"
        objects = [str(Path(folder) / f"{name}.o") for name in SOURCES]
        begin = [*command, "-isystem", jax.ffi.include_dir(), "-c"]
        each = [[*begin, str(_HERE / name), "-o", o] for name, o in zip(SOURCES, objects)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run_command, each))
        _run_command([*command, *objects, "-o", str(whole)])
        os.replace(whole, made)


def _run_command(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise OSError(
            f"{shlex.join(command[:1])} ended with {done.returncode}: {done.stderr.strip()[-800:]}"
        )
    return done.stdout


def _processor() -> str:
    """Returns the processor's features."""
    # A shared home directory may serve several kinds of machines.
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    lines = info.read_text().splitlines()
    features = (line for line in lines if line.startswith(("flags", "Features")))
    return next(features, platform.processor())
