"""1 to 64 requests for cold adapters at once, distinct ones and one and the same: when each has its
slot.

Command: python -m benchmarks --config=configs/sweeps/cold_staircase.py:cpu
  --workdir=runs/sweeps/cpu/cold_staircase
Sizes: configs/sweeps/cold_staircase.py:ci, configs/sweeps/cold_staircase.py:cpu,
  configs/sweeps/cold_staircase.py:gpu, configs/sweeps/cold_staircase.py:pod
Size cpu: six of Qwen3-30B-A3B's 48 layers at rank 1 and 8; two minutes on two CPU cores, 8 GB of
  memory. gpu and pod: all layers.
"""

from ml_collections import ConfigDict

SIZES = ("ci", "cpu", "gpu", "pod")
COUNTS = (1, 2, 4, 8, 16, 32, 64)
MINT = "arXiv 2605.13779, Qwen3-30B-A3B rank 1, 4 GPUs"


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"cold_staircase size {size!r}; expected ci, cpu, gpu or pod")
    tiny = size == "ci"
    counts = (1, 16) if tiny else COUNTS  # 16 is what the paper has a figure of
    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "cold_staircase"
    config.size = size
    config.claim = (
        "Cold loads run side by side up to the machine's cores and share one load of the same"
        " adapter: no staircase."
    )
    options = (f"--config.counts={counts}", "--config.rank={rank}")
    config.grids = ConfigDict(
        {
            "at_once": {
                "config": f"configs/bench/cold_staircase.py{':ci' if tiny else ''}",
                "about": (
                    "Seconds to the first, the median and the last slot; over_one is the last over"
                    " a single request's."
                ),
                "axes": {"rank": (1,) if tiny else (1, 8)},
                "options": (
                    options if size in ("ci", "cpu") else (*options, "--config.shape.layers=48")
                ),
                "minutes": 0.2 if tiny else 1.0,
                "each": {"kind": ("distinct", "identical"), "count": counts},
                "figures": {
                    **{
                        name: f"points/name={{count}} {{kind}}/{name}"
                        for name in ("first_s", "middle_s", "last_s", "over_one", "reads")
                    },
                    "adapter_bytes": "adapter_bytes",
                },
            }
        }
    )
    config.references = ConfigDict(
        {
            "mint_distinct": {
                "who": "MinT",
                "source": MINT,
                "grid": "at_once",
                "settings": {"rank": 1, "kind": "distinct", "count": 16},
                "figures": {"first_s": 1.375, "last_s": 23.27, "over_one": 16.9, "reads": 16},
                "note": "one exclusive lock: a staircase of 1.36 s each",
            },
            "mint_identical": {
                "who": "MinT",
                "source": MINT,
                "grid": "at_once",
                "settings": {"rank": 1, "kind": "identical", "count": 16},
                "figures": {"last_s": 1.56, "reads": 1},
                "note": "one load",
            },
        }
    )
    lines = {"grid": "at_once", "x": "count", "by": ("kind",), "panels": "rank", "log": "xy"}
    config.pictures = ConfigDict(
        {"last": lines | {"y": "last_s"}, "over_one": lines | {"y": "over_one"}}
    )
    return config
