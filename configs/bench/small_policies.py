"""Policies of biases, and over a shared output basis: reward by bytes on two tasks beside LoRA, and
time of a load.

Command: python -m benchmarks --config=configs/bench/small_policies.py
  --workdir=runs/bench/small_policies
Default size: about 50 minutes on two CPU cores. Short: --config=configs/bench/small_policies.py:ci
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    if (tiny := size == "ci") == (size == "default"):
        raise ValueError(f"small_policies size {size!r}; expected default or ci")
    config = ConfigDict({"bench": "small_policies", "seed": 0})
    config.base = "tiny-random" if tiny else "smollm2-135m-instruct"
    config.tasks = ("digit_sum",) if tiny else ("digit_sum", "copy_word")
    config.seeds = (0,) if tiny else (0, 1)
    config.steps = 1 if tiny else 0  # 0: as in the recipe
    config.eval = ConfigDict(
        {"examples": 1, "samples": 1} if tiny else {"examples": 24, "samples": 4}
    )
    # loads
    config.revisions, config.n = (2, 2) if tiny else (20, 200)
    config.slots, config.host_entries = 4, 4
    return config
