"""Bundles of one tile of rows in the TPU compiler's static schedule: packed LoRA compared with the
base's product.

The compiler dumps its final bundles if a flag is set while libtpu loads, so each chip's kernels are
compiled in their own process: ``python -m mint_jax.aot.schedule CHIP FOLDER``. The flags are
undocumented; without a dump there is an error and no report.

A tile is one grid iteration in the middle of a call, with finite rows and finite adapters in one
chunk. ``tile`` counts its bundles

- once: those of the iteration itself, which moves blocks of rows, and of the products. The products
exist twice, for at most half a chunk of adapters and for more; one of both runs;
- once per adapter: the loops that start and await the copies of factors and, backward, of
gradients;
- never: further chunks, the second computation for non-finite values, clearing at a call's first
tile, and tiles without an adapter.

For packed matmul an iteration is a visit, a tile and an expert. ``visit`` counts once the
iteration, the products with adapters and one of the two forms of the first; once per adapter the
loop that awaits their factors and the one that starts the copies of the next visit; and never what
runs only again or for further chunks.

Conditional instructions count always, and set-up outside the grid belongs to a call, not a tile.
The base's product is megablox's grouped matmul with one matrix as its tile, once for each
projection; backward, with the transposed matrix.

Axes: M rows, D in, F out, R rank, W factors, E experts.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.aot import bundles, chips
from mint_jax.aot.bundles import Part
from mint_jax.errors import UserError, choice
from pallas_kernels import cost

TILE, TILES = 128, 4  # several, since a single tile compiles to no loop
# gate and up of Qwen3-30B-A3B; the stacks exceed a core's memory
D, F, E, RANK, W = 2048, 768, 128, 16, 128 * 64
ADAPTERS = (1, 2, 4, 5, 8)  # adapters in a tile
# chip -> width of its matrix unit
CHIPS = {"v5e:2x2": 128, "v5p:2x2x1": 128, "v6e:2x2": 256, "tpu7x:2x2x1": 256}
GOALS = {128: 0.3, 256: 0.5}  # limit on bundles over the base's, up to GOAL_ADAPTERS in a tile
GOAL_ADAPTERS = 4
KERNELS = {  # kernel -> name in the dump
    "base": "gmm",
    "base_backward": "gmm",
    "add": "packed_lora",
    "backward": "packed_lora_backward",
    "one_pass": "packed_matmul",
}

_PRODUCT = r"vmatmul"
_COPY = r"= dma\.(?!done)\w+|dma\.done\.wait|vsyncadd"
_START = r"= dma\.(?!done)\w+"


def _compile(folder: Path, chip: str) -> None:
    """Compiles all kernels for a chip, each with a dump folder of its own; libtpu must have the
    dump flag.
    """
    import functools

    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
    from jax.sharding import SingleDeviceSharding

    from pallas_kernels.packed_lora import pallas_tpu
    from pallas_kernels.packed_matmul import pallas_tpu as packed_matmul

    device = chips.target(chip).devices[0]

    def spec(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    M = TILE * TILES
    x, wide, factor, sizes = (
        spec(M, D),
        [spec(M, F)] * 2,
        spec(M, dtype=jnp.int32),
        spec(E, dtype=jnp.int32),
    )
    a, b, w = [spec(W, RANK, D)] * 2, [spec(W, RANK, F)] * 2, spec(E, D, F)
    product = functools.partial(gmm, preferred_element_type=jnp.bfloat16)
    calls: dict[str, tuple[Any, Any, Any]] = {
        "base": (functools.partial(product, tiling=(TILE, D, F)), (x, w, sizes), ()),
        "base_backward": (
            functools.partial(product, tiling=(TILE, F, D), transpose_rhs=True),
            (wide[0], w, sizes),
            (),
        ),
        "add": (pallas_tpu.add, (x, a, b, wide, factor), 3),
        "backward": (pallas_tpu.backward, (x, a, b, wide, x, factor), 4),
        "one_pass": (
            functools.partial(packed_matmul.matmul, how=pallas_tpu.Config(rows=TILE)),
            (x, [w, w], sizes, a, b, factor),
            (),
        ),
    }
    for name, (call, args, donated) in calls.items():
        before = set(folder.iterdir()) if folder.is_dir() else set()
        with jax.default_device(device):
            jax.jit(call, donate_argnums=donated).lower(*args).compile()
        new = [path for path in folder.iterdir() if path not in before] if folder.is_dir() else []
        dumps = [
            path
            for path in new
            if re.search(rf"-{KERNELS[name]}[.\d]*-\d+-final_bundles\.txt$", path.name)
        ]
        if len(dumps) == 1:
            dumps[0].rename(folder / f"{name}.txt")


def schedules(chip: str, folder: Path) -> dict[str, Part]:
    """Returns the schedules of all ``KERNELS`` for a chip; their dumps stay in the folder.

    Raises:
        UserError: the compiler failed, or left no dump.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "the TPU compiler is not installed: pip install -e .[tpu-aot] (make setup"
            " EXTRAS=tpu-aot)"
        )
    folder = folder.resolve()
    dump = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        " --xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    environment = dict(os.environ, LIBTPU_INIT_ARGS=f"{given} {dump}".strip(), JAX_PLATFORMS="cpu")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", __name__, chip, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UserError(
            f"compiling the kernels for {chip} failed: {done.stderr.strip().splitlines()[-1:]}"
        )
    if missing := [name for name in KERNELS if not (folder / f"{name}.txt").is_file()]:
        raise UserError(
            f"the compiler left no schedule of {', '.join(missing)} for {chip}: this libtpu does"
            " not know the flags, or others"
        )
    return {name: bundles.parse((folder / f"{name}.txt").read_text()) for name in KERNELS}


def tile(kernel: Part, adapters: int) -> Counter[str]:
    """Counts bundles and instructions of one tile with this number of adapters (irrelevant to the
    base).

    Raises:
        UserError: the schedule does not have the form in the module's docstring.
    """
    outer = _grid(kernel)
    once, inner = [outer], _with_products(outer)
    while len(inner) == 1 and not _own_products(once[-1]):
        once.append(inner[0])
        inner = _with_products(inner[0])
    products = once[-1]
    # then two branches have them first: for at most half a chunk of adapters, and for more
    if not _own_products(products):
        chosen = inner[0 if adapters <= cost.COLUMNS // RANK // 2 else 1]
        once.append(chosen)
    copies = [
        part
        for part in products.walk()
        if part.kind == "loop" and part.has(_COPY) and not any(part in one.walk() for one in inner)
    ]
    starts = [part for part in copies if part.has(_START)]
    # the second of them starts those of a further chunk
    each = [part for part in copies if part not in starts[1:2]]

    def times(part: Part) -> int:
        if part in once:
            return 1
        if part in each:
            return adapters
        if part in products.walk():
            return int(any(one in each for one in part.walk()))
        return int(part.has(_COPY))

    return outer.run(times)


def visit(kernel: Part, adapters: int) -> Counter[str]:
    """Counts bundles and instructions of one packed-matmul visit with this number of adapters.

    Raises:
        UserError: the schedule does not have the form in the module's docstring.
    """
    once = [_grid(kernel)]
    while not _own_products(once[-1]) and (inner := _with_products(once[-1])):
        once.append(inner[-1])  # the first of two are the products without adapters
    products = once[-1]
    first = _with_products(products)[0 if adapters <= cost.COLUMNS // RANK // 2 else 1]
    copies = [part for part in products.parts if part.has(_COPY) and not part.has(_PRODUCT)]
    if len(copies) != 5:
        raise UserError(
            f"a visit copies factors in {len(copies)} places and not in five: the kernel or the"
            " compiler has changed"
        )
    # the others are for what is computed again, and for further chunks
    _, _, wait, start, _ = copies

    def times(part: Part) -> int:
        if any(part in one.walk() for one in (wait, start)):
            return adapters if part.kind == "loop" else 1
        if part in once or part is first:
            return 1
        return 0

    return once[0].run(times)


def _grid(kernel: Part) -> Part:
    turns = [part for part in kernel.walk() if part.kind == "loop" and part.has(_PRODUCT)]
    outer = [
        part
        for part in turns
        if not any(part in other.walk() for other in turns if other is not part)
    ]
    if len(outer) != 1:
        raise UserError(
            f"the products lie in {len(outer)} loops and not in one, the grid's: the kernel or the"
            " compiler has changed"
        )
    return outer[0]


def _with_products(part: Part) -> list[Part]:
    return [one for one in part.parts if one.has(_PRODUCT)]


def _own_products(part: Part) -> bool:
    return any(re.search(_PRODUCT, line) for line in part.lines)


def report(chip: str, folder: Path) -> dict[str, Any]:
    """Returns the counts of one tile on a chip by adapters, over the base; the lower bound of
    lanes; whether the goal is met; and one pass over two passes.
    """
    made, unit = schedules(chip, folder), CHIPS[chip]
    base, back = (
        {name: 2 * n for name, n in tile(made[of], 0).items()} for of in ("base", "base_backward")
    )
    forward = {
        str(n): _over(tile(made["add"], n), base) | {"lanes_over_base": round(_lanes(n, unit), 4)}
        for n in ADAPTERS
    }
    two = {n: base["bundles"] + forward[str(n)]["bundles"] for n in ADAPTERS}
    together = {n: visit(made["one_pass"], n) for n in ADAPTERS}
    most = max(forward[str(n)]["over_base"] for n in ADAPTERS if n <= GOAL_ADAPTERS)
    return {
        "matrix_unit": unit,
        "base": base,
        "add": forward,
        "goal": {
            "adapters": GOAL_ADAPTERS,
            "over_base": GOALS[unit],
            "reached": most,
            "met": most <= GOALS[unit],
        },
        "base_backward": back,
        "backward": {str(n): _over(tile(made["backward"], n), back) for n in ADAPTERS},
        "one_pass": {
            str(n): dict(of) | {"over_two": round(of["bundles"] / two[n], 4)}
            for n, of in together.items()
        },
    }


def _over(own: Counter[str], base: dict[str, int]) -> dict[str, Any]:
    return dict(own) | {"over_base": round(own["bundles"] / base["bundles"], 4)}


def _lanes(adapters: int, unit: int) -> float:
    """Returns passes of the matrix unit over the base's."""
    factor = np.repeat(np.arange(adapters), -(-TILE // adapters))[:TILE]
    return cost.packed_lora_passes(factor, RANK, D, (F, F), unit) / (2 * cost.passes(D, F, unit))


def reports(names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns the reports of several chips, with the compiler and what was compiled.

    Raises:
        UserError: a chip is unknown, or left no schedule.
    """
    if unknown := [name for name in names if name not in CHIPS]:
        raise choice("chip", unknown[0], CHIPS)
    shape = {
        "tile": TILE,
        "d_in": D,
        "d_out": [F, F],
        "rank": RANK,
        "factors": W,
        "dtype": "bfloat16",
    }
    chips_ = {name: report(name, folder / name.split(":")[0]) for name in names}
    return {"shape": shape, "libtpu": importlib.metadata.version("libtpu"), "chips": chips_}


if __name__ == "__main__":
    _compile(Path(sys.argv[2]), sys.argv[1])
