"""Pods that are not attached: bytes, collectives and rooflines of every pod config, by adapters and
rank, with our kernels and without.

Command: python -m benchmarks --config=configs/sweeps/scale_up.py:cpu
  --workdir=runs/sweeps/cpu/scale_up
Sizes: configs/sweeps/scale_up.py:ci, configs/sweeps/scale_up.py:cpu,
  configs/sweeps/scale_up.py:gpu, configs/sweeps/scale_up.py:pod
Needs the ``tpu-aot`` extra and no accelerator: all sizes run on a CPU.
Size cpu: Qwen3-4B on four v5p, about six minutes; gpu: all configs on a machine with many cores,
  hours; pod: these, and the search for the smallest pod of each.
"""

from ml_collections import ConfigDict

SIZES = ("ci", "cpu", "gpu", "pod")
BASES = (
    "qwen3_4b",
    "qwen3_30b_a3b",
    "qwen3_30b_a3b_experts",
    "qwen3_235b_a22b",
    "kimi_k2",
    "kimi_k2_experts",
    "glm_5",
)
GQA = "('q','k','v','o')"
ALL = "('all-linear',)"
PROGRAMS = ("train", "prefill", "decode")
OURS = (
    "packed_lora",
    "slot_lora",
    "packed_attention",
    "paged_attention",
    "latent_attention",
    "packed_matmul",
)


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"scale_up size {size!r}; expected ci, cpu, gpu or pod")
    tiny, all_of_them = size == "ci", size in ("gpu", "pod")
    bases = ("tiny",) if tiny else BASES if all_of_them else BASES[:1]
    # a point takes four minutes on two cores, and attention alone needs less than what is there
    targets = (GQA,) if tiny else (GQA, ALL) if all_of_them else (ALL,)
    figures = {
        "step_s": "{program}/estimate/step_s",
        "compute_s": "{program}/estimate/compute_s",
        "memory_s": "{program}/estimate/memory_s",
        "links_s": "{program}/estimate/links_s",
        "bound": "{program}/estimate/bound",
        "bytes_per_device": "{program}/bytes_per_device",
        "argument_bytes": "{program}/argument_bytes",
        "temporary_bytes": "{program}/temporary_bytes",
        "free_hbm": "{program}/free_hbm_fraction",
        "fits": "fits",
        "topology": "topology",
    }
    compiled = {
        "config": "configs/scale_up/{base}.py",
        "about": (
            "Of a device and a call; times are lower bounds from datasheet peaks, nothing was run."
        ),
        "axes": {"base": bases, "rank": (1,) if tiny else (1, 16), "targets": targets},
        "options": ("--config.adapter.rank={rank}", "--config.adapter.targets={targets}"),
        "minutes": 1.0 if tiny else 3.0,
        "each": {"program": PROGRAMS},
        "figures": figures,
    }
    # latent attention has other projections, of which "all-linear" is the one name that holds for
    # both
    latent = ("kimi_k2", "kimi_k2_experts", "glm_5")
    compiled["without"] = tuple({"base": base, "targets": GQA} for base in latent)
    grids = {"compiled": compiled}
    if not tiny:
        grids["xla"] = compiled | {
            "about": "The same with none of our kernels, at rank 16 on all linear projections.",
            "axes": {"base": bases, "rank": (16,), "targets": (ALL,)},
            "options": (*compiled["options"], *(f"--config.kernels.{name}=xla" for name in OURS)),
            "without": (),
        }
    if size == "pod":
        grids["smallest"] = compiled | {
            "about": "The smallest pod of v5p that holds training and sampling.",
            "axes": {"base": bases, "rank": (16,), "targets": (ALL,)},
            "options": (*compiled["options"], "--config.topology=smallest", "--config.chip=v5p"),
            "without": (),
            "minutes": 10.0,
        }
    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "scale_up"
    config.size = size
    config.claim = (
        "What training and sampling of many policies takes of a pod's memory, links and time, from"
        " the programs compiled for it."
    )
    config.grids = ConfigDict(grids)
    config.references = ConfigDict(
        {
            "mint": {
                "who": "MinT",
                "source": "arXiv 2605.13779",
                "grid": "compiled",
                "settings": {},
                "figures": {"largest_base": "Kimi K2, 1.04 T parameters"},
                "note": "bases up to it are reported to run; no bytes or rooflines are given",
            }
        }
    )
    config.pictures = ConfigDict(
        {
            "step": {
                "grid": "compiled",
                "x": "rank",
                "y": "step_s",
                "by": ("base", "targets"),
                "panels": "program",
                "log": "xy",
            },
            "memory": {
                "grid": "compiled",
                "x": "rank",
                "y": "bytes_per_device",
                "by": ("base", "targets"),
                "panels": "program",
                "log": "xy",
            },
        }
    )
    return config
