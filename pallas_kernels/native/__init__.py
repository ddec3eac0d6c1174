"""Kernels for CPUs in C++, called by XLA through its foreign functions: compiled once for this
machine's own processor, on first use.

XLA's form of these ops copies what it reads before it multiplies: a layer's matrices out of the
stack, the pages of a row's context, an adapter for every row. A step of decoding is little else
than reading, so these kernels read from where things lie. They are compiled where they run, for the
vectors that are there; a machine without a C++ compiler has XLA's forms, and ``dispatch`` says why.

``CXX`` names the compiler. What it made is kept beside the other caches, in ``MINT_JAX_CACHE`` or
``~/.cache/mint_jax``.
"""

import ctypes
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
SOURCES = ("layer_matmul.cc", "block_matmul.cc", "slot_lora.cc", "paged_attention.cc", "draw.cc")
HEADERS = ("products.h", "threads.h", "vectors.h")
TARGETS = (
    "mint_layer_matmul",
    "mint_block_matmul",
    "mint_block_unpack",
    "mint_slot_lora",
    "mint_paged_attention",
    "mint_draw",
)
# No -ffast-math: a NaN has to stay one, and sums are in the order that they are written in. What is
# fused says so (multiply_add): left to the compiler it is fused in some loops and not in others,
# and a row's bits depend on which loop had it.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-w",
)
SECONDS = 300  # a compiler that takes longer hangs


def call(
    target: str,
    results: Any,
    *args: jax.Array,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """One of ``TARGETS`` of arrays, as ``jax.ffi.ffi_call`` has it.

    Raises:
        NotImplementedError: see ``require``.
    """
    require()
    return jax.ffi.ffi_call(target, results, input_output_aliases=aliases or {})(
        *args, **attributes
    )


def require() -> None:
    """Compiles and registers the kernels, once in a process.

    Raises:
        NotImplementedError: they cannot be compiled, or this process computes on an accelerator,
            where compiling them takes 19 s for programs that never run.
    """
    if (backend := jax.default_backend()) != "cpu":
        raise NotImplementedError(f"this process computes on a {backend}")
    why = _load()
    if why:
        raise NotImplementedError(why)


def require_one_device() -> None:
    """Raises NotImplementedError where XLA would divide a call over devices, of which it knows
    nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = {
        name: size
        for name, size in dict(mesh.shape).items()
        if size > 1 and name not in mesh.manual_axes
    }
    if split:
        raise NotImplementedError(f"a mesh of {split} divides rows and matrices")


@functools.cache
def _load() -> str:
    """Why there are no kernels; empty where they are registered."""
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
    raise OSError("no C++ compiler is there: install g++ or clang++, or name one with CXX")


def _built() -> Path:
    """The library for these sources, this compiler, this processor and this jaxlib."""
    compiler = shlex.split(_compiler())
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    command = [
        *compiler,
        *FLAGS,
        native,
        *(["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []),
    ]
    about = [
        *command,
        jaxlib.__version__,
        platform.machine(),
        _processor(),
        _told([*compiler, "--version"]),
    ]
    digest = hashlib.blake2b(digest_size=12)
    for part in (
        *(word.encode() for word in about),
        *((_HERE / name).read_bytes() for name in (*SOURCES, *HEADERS)),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    made = cache.folder() / "native" / f"kernels-{digest.hexdigest()}.so"
    if made.is_file():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    # several processes may do this at once, and each ends with a whole file
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        whole = Path(folder) / "kernels.so"
        objects = [str(Path(folder) / f"{name}.o") for name in SOURCES]
        each = [
            [*command, "-isystem", jax.ffi.include_dir(), "-c", str(_HERE / name), "-o", o]
            for name, o in zip(SOURCES, objects)
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_told, each))
        _told([*command, *objects, "-o", str(whole)])
        os.replace(whole, made)
    return made


def _told(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise OSError(
            f"{shlex.join(command[:1])} ended with {done.returncode}: {done.stderr.strip()[-800:]}"
        )
    return done.stdout


def _processor() -> str:
    """What the processor can do, as far as the system tells: a home on a network may serve machines
    of several kinds.
    """
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    return next(
        (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))),
        platform.processor(),
    )
