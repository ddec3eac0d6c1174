"""Sizes of the kernels' tiles by measurement, into tables that programs on this machine take from
then on; for a GPU or a TPU.

Command: python -m benchmarks --config=configs/bench/tune_kernels.py
  --workdir=runs/bench/tune_kernels
Short: --config=configs/bench/tune_kernels.py:ci (the first shape of each op)
A CPU's kernels have no sizes to choose: there the report is empty, and says so.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "tune_kernels"
    config.seed = 0
    config.n = 7
    config.steps = 6  # of the search, of one call
    config.least_s = 0.005  # of a side: shorter calls are repeated
    # all; or names as in pallas_kernels.tuning: ("packed_lora", "packed_lora backward")
    config.ops = ()
    config.shapes = 0  # of each op; 0: all
    config.keep = True  # in the cache, where programs look for tables
    if size == "ci":
        config.n = 5
        config.steps = 1
        config.shapes = 1
    elif size != "default":
        raise ValueError(f"tune_kernels size {size!r}; expected default or ci")
    return config
