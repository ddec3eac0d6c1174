"""File to device slot of adapters on routed experts, by experts, rank and layout.

Command: python -m benchmarks --config=configs/sweeps/packed_load.py:cpu
  --workdir=runs/sweeps/cpu/packed_load
Sizes: configs/sweeps/packed_load.py:ci, configs/sweeps/packed_load.py:cpu,
  configs/sweeps/packed_load.py:gpu, configs/sweeps/packed_load.py:pod
Size cpu: four of Qwen3-30B-A3B's 48 layers, and all of them at 128 experts and rank 1; about two
  minutes on two CPU cores, 9 GB of memory.
"""

from ml_collections import ConfigDict

SIZES = ("ci", "cpu", "gpu", "pod")
LAYOUTS = ("per_tensor", "stacked_on_host", "middle", "packed")
MINT = (
    "arXiv 2605.13779, Qwen3-30B-A3B rank 1, read tensors and build the loader's objects, in"
    " PyTorch"
)
FIGURES = {
    "load_s": "seconds/{layout}",
    "tensors_unpacked": "tensors/unpacked",
    "tensors_packed": "tensors/packed",
    "bytes_unpacked": "file_bytes/unpacked",
    "bytes_packed": "file_bytes/packed",
    "ratio_packed": "ratio_packed",
}


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"packed_load size {size!r}; expected ci, cpu, gpu or pod")
    tiny = size == "ci"
    bench = f"configs/bench/packed_load.py{':ci' if tiny else ''}"
    loads = ("--config.parts=('loads',)", "--config.distinct=1", "--config.n=5")
    whole = {
        "config": bench,
        "about": "All 48 layers, the paper's shape." if not tiny else "A small shape.",
        "axes": {"experts": (8,) if tiny else (128,), "rank": (1,)},
        "options": (*loads, "--config.shape.experts={experts}", "--config.rank={rank}"),
        "minutes": 0.3 if tiny else 1.5,
        "each": {"layout": LAYOUTS},
        "figures": FIGURES,
    }
    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "packed_load"
    config.size = size
    config.claim = (
        "One packed object a revision loads as fast as its bytes; a tensor for each expert's"
        " projection costs by their number."
    )
    config.grids = ConfigDict({"whole": whole})
    if not tiny:
        layers = 4 if size == "cpu" else 48
        config.grids.experts = ConfigDict(
            {
                "config": bench,
                "about": f"{layers} of 48 layers.",
                "axes": {"experts": (8, 32, 128, 384), "rank": (1, 8, 32)},
                # 0.9 GB an adapter, several times in memory
                "without": ({"experts": 384, "rank": 32},) if size == "cpu" else (),
                "options": (
                    *loads,
                    f"--config.shape.layers={layers}",
                    "--config.shape.experts={experts}",
                    "--config.rank={rank}",
                ),
                "minutes": 0.5,
                "each": {"layout": LAYOUTS},
                "figures": FIGURES,
            }
        )
    config.references = ConfigDict(
        {
            "mint_original": {
                "who": "MinT",
                "source": MINT,
                "grid": "whole",
                "settings": {"experts": 128, "rank": 1, "layout": "per_tensor"},
                "figures": {
                    "load_s": 1.1209,
                    "tensors_unpacked": 37_248,
                    "bytes_unpacked": 110_750_000,
                    "live_load_s": 1.363,
                },
                "note": "0.3669 s to read and 0.7540 s to build; live load is of a burst of 4",
            },
            "mint_packed": {
                "who": "MinT",
                "source": MINT,
                "grid": "whole",
                "settings": {"experts": 128, "rank": 1, "layout": "packed"},
                "figures": {
                    "load_s": 0.0323,
                    "tensors_packed": 672,
                    "bytes_packed": 105_580_000,
                    "live_load_s": 0.156,
                },
                "note": "0.0067 s to read and 0.0256 s to build; live load is of a burst of 4",
            },
        }
    )
    grid = "whole" if tiny else "experts"
    config.pictures = ConfigDict(
        {
            "load": {
                "grid": grid,
                "x": "experts",
                "y": "load_s",
                "by": ("layout",),
                "panels": "rank",
                "log": "xy",
            }
        }
    )
    return config
