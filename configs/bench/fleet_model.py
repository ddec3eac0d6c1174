"""Engines that a wave of 2,300 distinct policies of a million names needs, by a model of measured
single engines.

Command: python -m benchmarks --config=configs/bench/fleet_model.py
--workdir=runs/bench/fleet_model Short:   --config=configs/bench/fleet_model.py:ci Seconds: nothing
is measured, two reports are read.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    if size not in ("default", "ci"):
        raise ValueError(f"fleet_model size {size!r}; expected default or ci")
    config = ConfigDict()
    config.bench = "fleet_model"
    # of the bench or the sweep
    config.active_wave = "notebooks/reports/cpu-2-cores/active_wave.json"
    # of packed_load or cold_staircase, bench or sweep
    config.cold_load = "notebooks/reports/cpu-2-cores/packed_load.json"
    config.names = 1_000_000  # addressable; bound by the catalog, not by engines
    config.wave = 2_300 if size == "default" else 8  # distinct policies that decode at once
    config.rank = 1  # of all
    config.tokens_per_s = 2.0  # that each stream must have
    config.tokens = 64  # of a stream
    config.cold_rate = 0.1  # of new streams, whose adapter is on no engine and in no host cache
    config.load_share = 0.5  # of an engine's time that cold loads may take
    return config
