"""Measurement of one program on one pod: its bytes against the memory, its work against datasheet
rates. Times are lower bounds: peaks, all links busy, compute, memory and links overlapped.
"""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from mint_jax.aot import hlo
from mint_jax.aot.chips import GIB, Target
from mint_jax.aot.flops import traced_flops
from mint_jax.aot.programs import Program, device_bytes
from pallas_kernels import tuning

TIMES = ("compute", "memory", "links")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Resources of a program; bytes and FLOPs are per device and call.

    Attributes:
        hbm: memory of the device.
        aliased: outputs in the buffers of donated arguments.
        total: needed at once.
        flops: of matrix products, the larger of the compiled program's and the traced share.
        flops_traced: of the traced function, divided by the devices; devices may repeat work.
        hbm_bytes: read arguments and new outputs.
        cost: of the compiled text, which does not state the FLOPs of hand-written kernels, and
            counts loops of unknown length once; not ``decode``'s loop over steps.
        seconds: of each of ``TIMES`` at the datasheet's rates.
        tokens: of all devices.
        compile_s: wall seconds.
        text: the compiled program.
        refused: the compiler's message where memory did not suffice. ``stated``: it has the missing
            bytes; else temporaries are assumed to be as large as the memory.
    """

    program: str
    hbm: int
    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0
    aliased: int = 0
    total: int = 0
    flops: float = 0.0
    flops_traced: float = 0.0
    hbm_bytes: float = 0.0
    cost: hlo.Cost = dataclasses.field(default_factory=hlo.Cost)
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    tokens: int = 0
    compile_s: float = 0.0
    text: str = ""
    refused: str = ""
    stated: bool = True

    @property
    def free(self) -> float:
        """Fraction of the memory that stays free; negative if the program does not fit."""
        return 1 - self.total / self.hbm

    def fits(self, margin: float) -> bool:
        """Returns true if this fraction of the memory stays free."""
        return not self.refused and self.free >= margin

    def reason(self, margin: float) -> str:
        """Reason why the program does not fit."""
        needs = f"{self.total / GIB:.1f} of {self.hbm / GIB:.1f} GiB a device"
        if self.refused and not self.stated:
            return f"{self.program} was refused by the compiler: {self.refused}"
        if self.refused or self.total > self.hbm:
            return f"{self.program} does not fit: it needs {needs}"
        return (
            f"{self.program} needs {needs}, which leaves {100 * self.free:.1f} % where"
            f" {100 * margin:.0f} % are to stay free"
        )

    def json(self, margin: float) -> dict[str, Any]:
        out: dict[str, Any] = {
            "fits": int(self.fits(margin)),
            "free_hbm_fraction": round(self.free, 4),
            "bytes_per_device": self.total,
            "argument_bytes": self.arguments,
            "temporary_bytes": self.temporaries,
        }
        if not self.text:  # refused, or several programs in one process
            return out | ({"refused": self.refused} if self.refused else {})
        cost, step_s = self.cost, max(self.seconds.values())
        collectives = {
            kind: {"count": int(n), "bytes": int(cost.bytes[kind]), "at_least": kind in cost.least}
            for kind, n in sorted(cost.counts.items())
        }
        estimate: dict[str, Any] = {f"{name}_s": time_s for name, time_s in self.seconds.items()}
        estimate |= {"step_s": step_s, "bound": max(TIMES, key=self.seconds.__getitem__)}
        return out | {
            "output_bytes": self.outputs,
            "aliased_bytes": self.aliased,
            "flops": self.flops,
            "flops_traced": self.flops_traced,
            "hbm_bytes": self.hbm_bytes,
            "collectives": collectives,
            "kernels": int(cost.kernels),
            "loops_counted_once": cost.unknown_loops,
            "estimate": estimate | {"tokens_per_s": self.tokens / step_s if step_s else 0.0},
            "compile_s": round(self.compile_s, 1),
        }


def colocated(measured: Sequence[Measured], base_bytes: int) -> Measured:
    """Returns the memory of the four programs over one base, running one at a time."""
    # The arguments of `prefill` are those of `decode` except its plan of some kilobytes.
    by = {m.program: m for m in measured}
    resident = by["train"].arguments + by["decode"].arguments - base_bytes
    added = [m.temporaries + m.outputs - m.aliased for m in measured]
    total = resident + max(added)
    return Measured("colocated", measured[0].hbm, resident, max(added), total=total)


def measure(program: Program, mesh: Mesh, target: Target) -> Measured:
    """Compiles a program for a target and measures it."""
    began = time.monotonic()
    with tuning.on(target.devices[0].device_kind):
        traced = program.trace(mesh)
    flops_traced = traced_flops(traced.jaxpr.jaxpr, mesh.size) / mesh.size
    try:
        with _not_cached():
            compiled = traced.lower().compile(target.options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        arguments, asked = device_bytes(program.args), _temporaries(str(error))
        temporaries = target.hbm if asked is None else asked
        return Measured(
            *(program.name, target.hbm, arguments, temporaries),
            total=arguments + temporaries,
            compile_s=time.monotonic() - began,
            refused=" ".join(str(error).split())[:300],
            stated=asked is not None,
        )
    seconds, text = time.monotonic() - began, compiled.as_text()
    m, cost = compiled.memory_analysis(), hlo.Module(text, program.steps, program.trips).cost()
    arguments, temporaries = m.argument_size_in_bytes, m.temp_size_in_bytes
    outputs, aliased = m.output_size_in_bytes, m.alias_size_in_bytes
    flops = max(cost.flops, flops_traced)
    hbm_bytes = float(arguments - program.unread + outputs - aliased)
    times = flops / target.flops, hbm_bytes / target.hbm_rate
    times += (sum(cost.bytes.values()) / target.link_rate,)
    return Measured(
        *(program.name, target.hbm, arguments, temporaries, outputs, aliased),
        total=arguments + temporaries + outputs - aliased,
        flops=flops,
        flops_traced=flops_traced,
        hbm_bytes=hbm_bytes,
        cost=cost,
        seconds=dict(zip(TIMES, times)),
        tokens=program.tokens,
        compile_s=seconds,
        text=text,
    )


@contextlib.contextmanager
def _not_cached() -> Iterator[None]:
    """Disables the compilation cache: programs for absent devices cannot be read back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _temporaries(message: str) -> int | None:
    found = re.search(r"([\d.]+)([KMGT])\w*\)? (?:exceeds|of) ", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None
