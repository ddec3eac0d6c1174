"""Engines that a wave of up to 10,000 distinct policies of a million names needs: a model of what
single engines were measured to do.

Command: python -m benchmarks --config=configs/sweeps/fleet_model.py:cpu
--workdir=runs/sweeps/cpu/fleet_model Sizes:   configs/sweeps/fleet_model.py:ci,
configs/sweeps/fleet_model.py:cpu, configs/sweeps/fleet_model.py:gpu,
         configs/sweeps/fleet_model.py:pod
Reads the reports of the sweeps active_wave and cold_staircase beside its own workdir, and says
which; refuses where they are missing. Two minutes.
"""

from ml_collections import ConfigDict

SIZES = ("ci", "cpu", "gpu", "pod")
READS = {
    "active_wave": "{beside}/active_wave/report.json",
    "cold_load": "{beside}/cold_staircase/report.json",
}


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"fleet_model size {size!r}; expected ci, cpu, gpu or pod")
    tiny = size == "ci"
    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "fleet_model"
    config.size = size
    config.claim = (
        "A model, not a measurement: engines for a wave of distinct policies, from curves of single"
        " engines that were measured."
    )
    speed = "0.1" if tiny else "2.0" if size == "cpu" else "20.0"
    config.grids = ConfigDict(
        {
            "engines": {
                "config": f"configs/bench/fleet_model.py{':ci' if tiny else ''}",
                "about": (
                    f"Each policy has a stream of {speed} tokens a second, 64 in all; cold_rate is"
                    " the share of streams that load."
                ),
                "axes": {
                    "wave": (8,) if tiny else (64, 512, 2_300, 10_000),
                    "cold_rate": (0.1,) if tiny else (0.01, 0.1, 0.5),
                },
                "options": (
                    *(f"--config.{name}={path}" for name, path in READS.items()),
                    "--config.wave={wave}",
                    "--config.cold_rate={cold_rate}",
                    f"--config.rank={8 if tiny else 1}",
                    f"--config.tokens_per_s={speed}",
                ),
                "reads": tuple(READS.values()),
                "minutes": 0.1,
                "figures": (
                    {f"{name}_from": f"read/{name}/config" for name in READS}
                    | {f"{name}_commit": f"read/{name}/commit" for name in READS}
                    | {
                        name: name
                        for name in (
                            "engines",
                            "engines_slots",
                            "engines_speed",
                            "engines_cold",
                            "adapters_an_engine",
                            "cold_loads_per_s",
                            "names",
                        )
                    }
                ),
                "data": {"read": "read"},
            }
        }
    )
    config.references = ConfigDict(
        {
            "mint": {
                "who": "MinT",
                "source": "arXiv 2605.13779, Qwen3-30B-A3B rank 1, 4 GPUs",
                "grid": "engines",
                "settings": {"wave": 2_300},
                "figures": {"adapters_an_engine": 64, "names": 1_000_000},
                "note": (
                    "a million names and a wave of 2,300 were sized on paper, never run; 64 is the"
                    " most in one batch that was measured"
                ),
            }
        }
    )
    config.pictures = ConfigDict(
        {
            "engines": {
                "grid": "engines",
                "x": "wave",
                "y": "engines",
                "by": ("cold_rate",),
                "log": "xy",
            }
        }
    )
    return config
