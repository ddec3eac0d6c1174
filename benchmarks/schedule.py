"""Bundles that adapters add to a tile of rows in the TPU compiler's static schedule; nothing runs.

libtpu dumps final bundles if an undocumented flag is set while it loads, so each chip's kernels are
compiled in their own process. A tile is one grid iteration in the middle of a call, with finite
rows and adapters in one chunk. The base's product is megablox's grouped matmul.

Axes: M rows, D in, F out, R rank, W factors, E experts.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jax.sharding import SingleDeviceSharding

from benchmarks import bundles
from benchmarks.bundles import Part
from mint_jax.aot import chips
from mint_jax.errors import UserError, choice
from pallas_kernels import cost
from pallas_kernels.packed_lora import pallas_tpu
from pallas_kernels.packed_matmul import pallas_tpu as packed_matmul

TILE, TILES = 128, 4  # several, since a single tile compiles to no loop
# gate and up of Qwen3-30B-A3B; the stacks exceed a core's memory
D, F, E, RANK, W = 2048, 768, 128, 16, 128 * 64
ADAPTERS = (1, 2, 4, 5, 8)  # adapters in a tile
CHIPS = {"v5e:2x2": 128, "v5p:2x2x1": 128, "v6e:2x2": 256, "tpu7x:2x2x1": 256}  # matrix units
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
_START = r"= dma\.(?!done)\w+"
_COPY = rf"{_START}|dma\.done\.wait|vsyncadd"
_CHANGED = "the kernel or the compiler has changed"


def run(config: Any, folder: Path) -> dict[str, Any]:
    """Compiles for every chip and counts; the compiler's dumps stay in the workdir."""
    if unknown := [name for name in config.chips if name not in CHIPS]:
        raise choice("chip", unknown[0], CHIPS)
    dumps = folder / "dumps"
    shape = {"tile": TILE, "d_in": D, "d_out": [F, F], "rank": RANK, "factors": W}
    return {
        "shape": shape | {"dtype": "bfloat16"},
        "libtpu": importlib.metadata.version("libtpu"),
        "chips": {name: _count(name, dumps / name.split(":")[0]) for name in config.chips},
    }


def _compile(folder: Path, chip: str) -> None:
    """Compiles all kernels for a chip, each with a dump folder of its own; libtpu must have the
    dump flag.
    """
    device = chips.target(chip).devices[0]

    def spec(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    M = TILE * TILES
    x, wide = spec(M, D), [spec(M, F)] * 2
    factor, sizes = spec(M, dtype=jnp.int32), spec(E, dtype=jnp.int32)
    a, b, w = [spec(W, RANK, D)] * 2, [spec(W, RANK, F)] * 2, spec(E, D, F)
    product = functools.partial(gmm, preferred_element_type=jnp.bfloat16)
    back = functools.partial(product, tiling=(TILE, F, D), transpose_rhs=True)
    one_pass = functools.partial(packed_matmul.matmul, how=pallas_tpu.Config(rows=TILE))
    calls: dict[str, tuple[Any, Any, Any]] = {
        "base": (functools.partial(product, tiling=(TILE, D, F)), (x, w, sizes), ()),
        "base_backward": (back, (wide[0], w, sizes), ()),
        "add": (pallas_tpu.add, (x, a, b, wide, factor), 3),
        "backward": (pallas_tpu.backward, (x, a, b, wide, x, factor), 4),
        "one_pass": (one_pass, (x, [w, w], sizes, a, b, factor), ()),
    }
    for name, (call, args, donated) in calls.items():
        before = set(folder.glob("*"))
        with jax.default_device(device):
            jax.jit(call, donate_argnums=donated).lower(*args).compile()
        dump = re.compile(rf"-{KERNELS[name]}[.\d]*-\d+-final_bundles\.txt$")
        dumps = [path for path in {*folder.glob("*")} - before if dump.search(path.name)]
        if len(dumps) == 1:
            dumps[0].rename(folder / f"{name}.txt")


def schedules(chip: str, folder: Path) -> dict[str, Part]:
    """Returns the schedules of all ``KERNELS`` for a chip; their dumps stay in the folder."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "the TPU compiler is not installed: pip install -e .[tpu-aot] (make setup"
            " EXTRAS=tpu-aot)"
        )
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    flags = (
        f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={folder}"
        " --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    done = subprocess.run(
        [sys.executable, "-m", __name__, chip, str(folder)],
        env=os.environ | {"LIBTPU_INIT_ARGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise UserError(f"compiling the kernels for {chip} failed: {last}")
    if missing := [name for name in KERNELS if not (folder / f"{name}.txt").is_file()]:
        raise UserError(
            f"the compiler left no schedule of {', '.join(missing)} for {chip}: this libtpu does"
            " not know the flags, or others"
        )
    return {name: bundles.parse((folder / f"{name}.txt").read_text()) for name in KERNELS}


def tile(kernel: Part, adapters: int) -> Counter[str]:
    """Counts bundles and instructions of one tile with this number of adapters.

    Counted once: the iteration and its products, which exist for at most half a chunk of adapters
    and for more. Once per adapter: the loops that start and await copies. Never: further chunks,
    the second computation for non-finite values, clearing at a call's first tile, tiles without an
    adapter.
    """
    outer = _grid(kernel)
    once, inner = [outer], _with_products(outer)
    while len(inner) == 1 and not _own_products(once[-1]):
        once.append(inner[0])
        inner = _with_products(inner[0])
    products = once[-1]
    # then two branches have them first: for at most half a chunk of adapters, and for more
    if not _own_products(products):
        once.append(_by_adapters(inner, adapters))
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
    """Counts bundles and instructions of one packed-matmul visit, a tile and an expert, with this
    number of adapters. Once per adapter: the loops that await and start copies of factors. Never:
    what runs only again or for further chunks.
    """
    once = [_grid(kernel)]
    while not _own_products(once[-1]) and (inner := _with_products(once[-1])):
        once.append(inner[-1])  # the first of two are the products without adapters
    products = once[-1]
    first = _by_adapters(_with_products(products), adapters)
    copies = [part for part in products.parts if part.has(_COPY) and not part.has(_PRODUCT)]
    if len(copies) != 5:
        raise UserError(
            f"a visit copies factors in {len(copies)} places and not in five: {_CHANGED}"
        )
    # the others are for what is computed again, and for further chunks
    _, _, wait, start, _ = copies

    def times(part: Part) -> int:
        if any(part in one.walk() for one in (wait, start)):
            return adapters if part.kind == "loop" else 1
        return int(part in once or part is first)

    return once[0].run(times)


def _by_adapters(parts: list[Part], adapters: int) -> Part:
    """Returns the branch for at most half a chunk of adapters, or the one for more."""
    return parts[0 if adapters <= cost.COLUMNS // RANK // 2 else 1]


def _grid(kernel: Part) -> Part:
    turns = [part for part in kernel.walk() if part.kind == "loop" and part.has(_PRODUCT)]
    inner = [one for part in turns for one in part.walk() if one is not part]
    outer = [part for part in turns if not any(part is one for one in inner)]
    if len(outer) != 1:
        raise UserError(
            f"the products lie in {len(outer)} loops and not in one, the grid's: {_CHANGED}"
        )
    return outer[0]


def _with_products(part: Part) -> list[Part]:
    return [one for one in part.parts if one.has(_PRODUCT)]


def _own_products(part: Part) -> bool:
    return any(re.search(_PRODUCT, line) for line in part.lines)


def _count(chip: str, folder: Path) -> dict[str, Any]:
    """Returns the counts of one tile on a chip by adapters, over the base; the lower bound of
    lanes; whether the goal is met; and one pass over two passes.
    """
    made, unit = schedules(chip, folder), CHIPS[chip]
    base, back = (
        {name: 2 * n for name, n in tile(made[of], 0).items()} for of in ("base", "base_backward")
    )
    add, one_pass = {}, {}
    for n in ADAPTERS:
        lanes = {"lanes_over_base": round(_lanes(n, unit), 4)}
        add[str(n)] = _over(tile(made["add"], n), base) | lanes
        found, two = visit(made["one_pass"], n), base["bundles"] + add[str(n)]["bundles"]
        one_pass[str(n)] = dict(found) | {"over_two": round(found["bundles"] / two, 4)}
    most = max(add[str(n)]["over_base"] for n in ADAPTERS if n <= GOAL_ADAPTERS)
    goal = {"adapters": GOAL_ADAPTERS, "over_base": GOALS[unit], "reached": most}
    return {
        "matrix_unit": unit,
        "base": base,
        "add": add,
        "goal": goal | {"met": most <= GOALS[unit]},
        "base_backward": back,
        "backward": {str(n): _over(tile(made["backward"], n), back) for n in ADAPTERS},
        "one_pass": one_pass,
    }


def _over(own: Counter[str], base: dict[str, int]) -> dict[str, Any]:
    return dict(own) | {"over_base": round(own["bundles"] / base["bundles"], 4)}


def _lanes(adapters: int, unit: int) -> float:
    """Returns passes of the matrix unit over the base's."""
    factor = np.repeat(np.arange(adapters), -(-TILE // adapters))[:TILE]
    return cost.packed_lora_passes(factor, RANK, D, (F, F), unit) / (2 * cost.passes(D, F, unit))


if __name__ == "__main__":
    _compile(Path(sys.argv[2]), sys.argv[1])
