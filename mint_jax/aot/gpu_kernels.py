"""Resources of every GPU kernel on an H200, by the compiler of the CUDA wheels, without a GPU.

``python -m mint_jax.aot.gpu_kernels`` compiles every kernel in every shape of ``shapes.py`` and
prints what ``ptxas`` reports: lowering alone misses kernels that Triton refuses, or that need too
much memory.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mint_jax.aot import chips
from mint_jax.errors import UserError
from pallas_kernels import tuning
from pallas_kernels.calls import Call, calls


class Kernel(NamedTuple):
    """Report of ``ptxas`` on one kernel."""

    name: str  # name of the function
    registers: int  # registers of a thread
    spilled: int  # bytes that a thread spills


def kernels(report: str) -> list[Kernel]:
    """Parses the output of ``ptxas -v``, in its order."""
    out = []
    for one in re.split(r"Compiling entry function ", report)[1:]:
        name, spilled, registers = (
            re.search(p, one)
            for p in (r"'(\w+)'", r"(\d+) bytes spill stores", r"Used (\d+) registers")
        )
        if name is None or spilled is None or registers is None:
            raise ValueError(f"ptxas says something else than it used to: {one}")
        out.append(Kernel(name[1], int(registers[1]), int(spilled[1])))
    return out


def compiled(call: Call, target: chips.Target, folder: Path) -> tuple[list[Kernel], int]:
    """Returns the Pallas kernels of a program, and its bytes of temporaries."""
    with jax.default_device(target.devices[0]), tuning.on(target.devices[0].device_kind):
        lowered: Any = jax.jit(call.fn, donate_argnums=call.donated).lower(*call.args)
    made = lowered.compile(target.options | {"xla_dump_to": str(folder)})
    ptxas = next(p for root in sys.path for p in Path(root).glob("nvidia/*/bin/ptxas"))
    out, written = [], sorted(folder.glob("*.ptx"))
    if not written:
        raise UserError(
            f"the XLA of jax {jax.__version__} writes no PTX of what it compiles, which is read"
            " here: jax 0.10.2 does"
        )
    for ptx in written:
        if not ptx.stat().st_size:  # constants only
            continue
        report = subprocess.run(
            [ptxas, "-v", "-arch=sm_90a", ptx, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        # XLA's own names start with a letter
        out += [one for one in kernels(report) if one.name.startswith("_")]
    return out, made.memory_analysis().temp_size_in_bytes


def main() -> None:
    target = chips.target("cuda:h200x1")
    for call in calls(target.devices[0], "cuda"):
        with tempfile.TemporaryDirectory() as folder:
            made, temporaries = compiled(call, target, Path(folder))
        report = ", ".join(
            f"{one.name} {one.registers} registers"
            + f" {one.spilled} bytes spilled" * (one.spilled > 0)
            for one in made
        )
        sys.stdout.write(f"{call.name}: {report}; {temporaries >> 10} KiB of temporaries\n")


if __name__ == "__main__":
    main()
