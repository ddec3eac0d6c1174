"""What the compiler of an H200 makes of the GPU kernels: registers, what it spills, temporaries. It needs no GPU, only the CUDA wheels.

``python -m mint_jax.aot.gpu_kernels`` compiles every kernel in every shape of ``shapes.py`` and has the wheels' ``ptxas`` tell of each what
it takes. Lowering alone does not show a kernel that Triton refuses, nor one that takes more shared memory than there is.
"""

import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from mint_jax.aot import chips
from mint_jax.models import attention
from pallas_kernels import dispatch, grouped_matmul, latent_attention, packed_lora, paged_attention
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.latent_attention import shapes as latent_shapes
from pallas_kernels.packed_attention import shapes as attention_shapes
from pallas_kernels.packed_lora import shapes as lora_shapes
from pallas_kernels.paged import PAGE, Rows
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.slot_lora import shapes as slot_shapes


class Call(NamedTuple):
    """One call of an op.

    Attributes:
        name: op and shape.
        fn: of ``args``.
        args: abstract.
        donated: which argument is added to in place.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]


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


def calls(device: Any) -> Iterator[Call]:
    """The ops in the shapes of their tests, as a program for this device has them."""

    def spec(*dims: int, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=SingleDeviceSharding(device))

    for s in grouped_shapes.SHAPES:
        w = (s.d_out, s.d_in) if s.transposed else (s.d_in, s.d_out)
        args = spec(s.rows, s.d_in, dtype=s.dtype), spec(s.groups, *w, dtype=s.stored), spec(s.groups, dtype="int32")
        yield Call(f"grouped_matmul {tuple(s)}", functools.partial(grouped_matmul.grouped_matmul, transposed=s.transposed), args, ())
    for s in (*lora_shapes.DECODE, *lora_shapes.TRAIN):
        x, factor = spec(s.rows, s.d_in, dtype=s.dtype), spec(s.rows, dtype="int32")
        a = [spec(s.factors, s.rank, s.d_in, dtype=s.dtype) for _ in s.d_out]
        b = [spec(s.factors, s.rank, F, dtype=s.dtype) for F in s.d_out]
        wide = [spec(s.rows, F, dtype=s.dtype) for F in s.d_out]
        for name, table, args, onto in (
            ("packed_lora", packed_lora.ADD, (x, a, b, wide, factor), 3),
            ("packed_lora backward", packed_lora.BACKWARD, (x, a, b, wide, x, factor), 4),
        ):
            yield Call(f"{name} {tuple(s)}", lambda *args, table=table: dispatch.run("packed_lora", table, "auto", args), args, (onto,))
    for s in (*slot_shapes.DECODE, *slot_shapes.PREFILL):
        x, onto, (F,) = spec(s.rows, s.d_in, dtype=s.dtype), spec(s.rows, *s.d_out, dtype=s.dtype), s.d_out
        a, b = (spec(s.factors, s.rank, n, dtype=s.dtype) for n in (s.d_in, F))
        inner, factor = spec(s.rows, s.rank, dtype="float32"), spec(s.rows, dtype="int32")
        yield Call(f"packed_lora shrink {tuple(s)}", packed_lora.pallas_gpu.shrink, (x, a, factor), ())
        yield Call(f"packed_lora expand {tuple(s)}", packed_lora.pallas_gpu.expand, (inner, b, onto, factor), (2,))
    yield from _attention(spec)


def _attention(spec: Callable[..., Any]) -> Iterator[Call]:
    for s in attention_shapes.TRAIN:
        of_k, scale = (s.B, s.K), s.H**-0.5
        q, out, k, v = (spec(*of_k, *dims, dtype=s.dtype) for dims in ((s.G, s.T, s.H), (s.G, s.T, s.V), (s.T, s.H), (s.T, s.V)))
        own, lse = spec(s.B, s.T, dtype="int32"), spec(*of_k, s.G, s.T, dtype="float32")
        for name, table, args in (
            ("packed_attention", attention.FORWARD, (q, k, v, own, own, None)),
            ("packed_attention backward", attention.BACKWARD, (q, k, v, own, own, None, out, lse, out)),
        ):
            fn = lambda *args, name=name, table=table, scale=scale: dispatch.run(name, table, "auto", args, scale=scale)  # noqa: E731
            yield Call(f"{name} {tuple(s)}", fn, args, ())

    def rows(s: paged_shapes.Shape | latent_shapes.Shape) -> Rows:
        numbers = (spec(s.rows, dtype="int32") for _ in range(3))
        return Rows(spec(dtype="int32"), spec(s.rows, s.positions // PAGE, dtype="int32"), *numbers)

    for s in (*paged_shapes.DECODE, *paged_shapes.TEAMS, *paged_shapes.PREFILL):
        pool = spec(2, 4096, s.heads, PAGE, s.width, dtype=s.dtype)
        args = spec(s.rows, s.heads, s.queries, s.head_dim, dtype=s.dtype), pool, pool, rows(s)
        yield Call(f"paged_attention {tuple(s)}", functools.partial(paged_attention.paged_attention, scale=s.head_dim**-0.5), args, ())
    for s in (*latent_shapes.DECODE, *latent_shapes.TEAMS, *latent_shapes.PREFILL):
        queries = (spec(s.rows, s.queries, n, dtype=s.dtype) for n in (s.latent, s.rope))
        pools = (spec(2, 4096, PAGE, n, dtype=s.dtype) for n in (s.latent, s.width))
        args = *queries, *pools, rows(s)
        yield Call(f"latent_attention {tuple(s)}", functools.partial(latent_attention.latent_attention, scale=s.latent**-0.5), args, ())


def kernels(told: str) -> list[Kernel]:
    """Of what ``ptxas -v`` writes, in its order."""
    out = []
    for one in re.split(r"Compiling entry function ", told)[1:]:
        name, spilled, registers = (re.search(p, one) for p in (r"'(\w+)'", r"(\d+) bytes spill stores", r"Used (\d+) registers"))
        if name is None or spilled is None or registers is None:
            raise ValueError(f"ptxas says something else than it used to: {one}")
        out.append(Kernel(name[1], int(registers[1]), int(spilled[1])))
    return out


def compiled(call: Call, target: chips.Target, folder: Path) -> tuple[list[Kernel], int]:
    """The kernels of Pallas in the program, and its bytes of temporaries."""
    with jax.default_device(target.devices[0]):
        lowered: Any = jax.jit(call.fn, donate_argnums=call.donated).lower(*call.args)
    made = lowered.compile(target.options | {"xla_dump_to": str(folder)})
    ptxas = next(Path(jax.__file__).parents[1].glob("nvidia/*/bin/ptxas"))
    out = []
    for ptx in sorted(folder.glob("*.ptx")):
        if not ptx.stat().st_size:  # of constants alone
            continue
        told = subprocess.run([ptxas, "-v", "-arch=sm_90a", ptx, "-o", "/dev/null"], capture_output=True, text=True, check=True).stderr
        out += [one for one in kernels(told) if one.name.startswith("_")]  # XLA's own begin with a letter
    return out, made.memory_analysis().temp_size_in_bytes


def main() -> None:
    target = chips.target("cuda:h200x1")
    for call in calls(target.devices[0]):
        with tempfile.TemporaryDirectory() as folder:
            made, temporaries = compiled(call, target, Path(folder))
        told = ", ".join(f"{one.name} {one.registers} registers" + f" {one.spilled} bytes spilled" * (one.spilled > 0) for one in made)
        sys.stdout.write(f"{call.name}: {told}; {temporaries >> 10} KiB of temporaries\n")


if __name__ == "__main__":
    main()
