"""Datasheet peaks of accelerators, and compile-only devices of a named pod.

A target is named by its torus, ``v5p:4x4x8`` (128 TPU v5p chips), or by its cloud name,
``v5p-256``; ``cuda:h200x8`` is one server of eight GPUs. Estimates that use datasheet peaks are
lower bounds.
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

from mint_jax import interrupts
from mint_jax.errors import UserError, choice

GIB = 1 << 30

# what libtpu reads as it loads: no machine metadata, no log files, no lock against a second process
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """Datasheet peaks of one chip."""

    hbm: int  # bytes; the runtime keeps a few percent of them
    flops: float  # dense bfloat16 operations per second
    hbm_rate: float  # bytes per second
    # bytes per second that leave the chip over all its links together, half the datasheet's
    # bidirectional rate
    link_rate: float
    slices: tuple[str, ...]  # sizes of its pods, smallest first


_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
CHIPS = {
    "v4": Chip(32 * GIB, 275e12, 1228e9, 300e9, _CUBES),
    "v5e": Chip(16 * GIB, 197e12, 819e9, 200e9, _FLAT),
    "v5p": Chip(95 * GIB, 459e12, 2765e9, 600e9, _CUBES),
    "v6e": Chip(32 * GIB, 918e12, 1638e9, 400e9, _FLAT),
    "tpu7x": Chip(192 * GIB, 2307e12, 7380e9, 600e9, _CUBES[:-1]),
    "cuda:h100": Chip(80_000_000_000, 989e12, 3350e9, 450e9, ("1", "2", "4", "8")),
    "cuda:h200": Chip(141_000_000_000, 989e12, 4800e9, 450e9, ("1", "2", "4", "8")),
}


# a cloud's name of a chip -> ours, and what the number behind it counts: TensorCores of a chip, or
# chips
IN_CLOUDS = {"v5litepod": ("v5e", 1), "v5e": ("v5e", 1), "v6e": ("v6e", 1)}
IN_CLOUDS |= {kind: (kind, 2) for kind in ("v4", "v5p", "tpu7x")}
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclasses.dataclass(frozen=True)
class Target:
    """A pod: its devices, and the peaks of one device (a chip may show as one device or as two)."""

    name: str  # as the user gave it
    chips: int  # how many
    devices: tuple[Any, ...]  # compile-only devices
    hbm: int  # this and flops, hbm_rate, link_rate: of one device, in the units of `Chip`
    flops: float
    hbm_rate: float
    link_rate: float
    options: dict[str, str]  # of the compiler, where it must not ask a device


def names(kind: str) -> list[str]:
    """Returns the targets of one chip kind, smallest first: ``v5p`` -> ``v5p:2x2x1`` and so on."""
    if kind not in CHIPS:
        raise choice("chip", kind, CHIPS)
    return [
        f"{kind}{'x' if kind.startswith('cuda:') else ':'}{size}" for size in CHIPS[kind].slices
    ]


def canonical(name: str) -> str:
    """Returns our name of a pod from a cloud name, ``v5p-64`` -> ``v5p:2x4x4``."""
    known = [each for kind in CHIPS for each in names(kind)]
    if name in known:
        return name
    cloud, _, size = name.lower().replace(":", "-").partition("-")
    if cloud not in IN_CLOUDS:
        raise choice("topology", name, [*known, "smallest"])
    kind, counted = IN_CLOUDS[cloud]
    by_number = {str(counted * _chips(kind, each)): each for each in names(kind)}
    by_size = by_number | {each.split(":")[1]: each for each in names(kind)}
    if size not in by_size:
        known = *(f"{cloud}-{n}" for n in by_number), *names(kind), "smallest"
        raise choice("topology", name, known)
    return by_size[size]


def need_compiler(name: str) -> None:
    """Refuses a pod or a kind of chip whose compiler is not installed, without loading it."""
    cuda = name.startswith("cuda:")
    if not any(
        importlib.util.find_spec(module) for module in (CUDA_PLUGINS if cuda else ("libtpu",))
    ):
        what, extra = ("CUDA", "cuda") if cuda else ("TPU", "tpu-aot")
        raise UserError(
            f"topology {name!r} needs the {what} compiler, which is not installed: pip install -e"
            f" .[{extra}] (make setup EXTRAS={extra})"
        )


def _chips(kind: str, name: str) -> int:
    return math.prod(map(int, re.findall(r"\d+", name.removeprefix(kind))))


def target(name: str) -> Target:
    """Returns the pod of a name, see ``canonical``; raises ``UserError`` without its compiler."""
    name = canonical(name)
    need_compiler(name)
    kind = next(kind for kind in CHIPS if name in names(kind))
    chip, chips = CHIPS[kind], _chips(kind, name)
    cuda = kind.startswith("cuda:")
    devices = tuple(_cuda_devices(kind, chips) if cuda else _tpu_devices(name))
    share = chips / len(devices)
    rates = (rate * share for rate in (chip.flops, chip.hbm_rate, chip.link_rate))
    options = {"xla_gpu_autotune_level": "0"} if cuda else {}
    return Target(name, chips, devices, int(chip.hbm * share), *rates, options=options)


def _tpu_devices(name: str) -> Any:
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    interrupts.restore()
    return devices


def _cuda_devices(kind: str, chips: int) -> Any:
    from jax.experimental import topologies

    model = kind.removeprefix("cuda:")
    config = _HOPPER.format(
        model=model.upper(), rate=int(CHIPS[kind].hbm_rate), memory=CHIPS[kind].hbm
    )
    return topologies.get_topology_desc(
        platform="cuda", topology_name=model, topology=f"1x1x{chips}", target_config=config
    ).devices


_HOPPER = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {rate} l2_cache_size: 52428800 clock_rate_ghz: 1.98
device_memory_size: {memory} shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 }}
registers_per_core_limit: 65536 registers_per_block_limit: 65536 }} platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }} device_description_str: "NVIDIA {model}" """  # noqa: E501
