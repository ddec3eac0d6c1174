"""What the compiler of an H200 makes of the GPU kernels: registers, what it spills, temporaries. It
needs no GPU, only the CUDA wheels.

``python -m mint_jax.aot.gpu_kernels`` compiles every kernel in every shape of ``shapes.py`` and has
the wheels' ``ptxas`` tell of each what it takes. Lowering alone does not show a kernel that Triton
refuses, nor one that takes more shared memory than there is.
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
from mint_jax.models.kernel_calls import Call, calls
from pallas_kernels import tuning


class Kernel(NamedTuple):
    """One kernel, as ``ptxas`` tells.

    Attributes:
        name: of the function.
        registers: of a thread.
        spilled: bytes of a thread that did not fit into registers, stored.
    """

    name: str
    registers: int
    spilled: int


def kernels(told: str) -> list[Kernel]:
    """Of what ``ptxas -v`` writes, in its order."""
    out = []
    for one in re.split(r"Compiling entry function ", told)[1:]:
        name, spilled, registers = (
            re.search(p, one)
            for p in (r"'(\w+)'", r"(\d+) bytes spill stores", r"Used (\d+) registers")
        )
        if name is None or spilled is None or registers is None:
            raise ValueError(f"ptxas says something else than it used to: {one}")
        out.append(Kernel(name[1], int(registers[1]), int(spilled[1])))
    return out


def compiled(call: Call, target: chips.Target, folder: Path) -> tuple[list[Kernel], int]:
    """The kernels of Pallas in the program, and its bytes of temporaries."""
    with jax.default_device(target.devices[0]), tuning.on(target.devices[0].device_kind):
        lowered: Any = jax.jit(call.fn, donate_argnums=call.donated).lower(*call.args)
    made = lowered.compile(target.options | {"xla_dump_to": str(folder)})
    ptxas = next(Path(jax.__file__).parents[1].glob("nvidia/*/bin/ptxas"))
    out, written = [], sorted(folder.glob("*.ptx"))
    if not written:
        raise UserError(
            f"the XLA of jax {jax.__version__} writes no PTX of what it compiles, which is read"
            " here: jax 0.10.2 does"
        )
    for ptx in written:
        if not ptx.stat().st_size:  # of constants alone
            continue
        told = subprocess.run(
            [ptxas, "-v", "-arch=sm_90a", ptx, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        # XLA's own begin with a letter
        out += [one for one in kernels(told) if one.name.startswith("_")]
    return out, made.memory_analysis().temp_size_in_bytes


def main() -> None:
    target = chips.target("cuda:h200x1")
    for call in calls(target.devices[0], "cuda"):
        with tempfile.TemporaryDirectory() as folder:
            made, temporaries = compiled(call, target, Path(folder))
        told = ", ".join(
            f"{one.name} {one.registers} registers"
            + f" {one.spilled} bytes spilled" * (one.spilled > 0)
            for one in made
        )
        sys.stdout.write(f"{call.name}: {told}; {temporaries >> 10} KiB of temporaries\n")


if __name__ == "__main__":
    main()
