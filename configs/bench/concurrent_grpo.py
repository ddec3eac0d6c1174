"""GRPO of 3 and of 8 policies over one base: one after another, overlapped, batched; and where
batching stops to pay.

Command: python -m benchmarks --config=configs/bench/concurrent_grpo.py
  --workdir=runs/bench/concurrent_grpo
Short: --config=configs/bench/concurrent_grpo.py:ci
Long: --config=configs/bench/concurrent_grpo.py:long
Rollouts one update behind: --config=configs/bench/concurrent_grpo.py:stale, four minutes
Default size: five minutes on two CPU cores; --config.memory=(8,) measures peak memory too, a
  quarter of a minute a process. Half an hour's :long has two steps in place of one, waiting
  rewards and peak memory (twice) of 8 policies and of 3, the overlapped schedule also where
  rewards take no time, and five points of the crossover.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "concurrent_grpo"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.steps = 1
    config.counts = (3, 8)
    config.schedules = ("sequential", "batched")  # where rewards take no time
    # counts that are also measured, by all schedules, where a reward takes reward_s
    config.waiting = (3,)
    config.reward_s = 1.0
    config.stale_rewards = ()  # seconds of a reward, each with max_staleness 0 and 1
    # counts whose peak memory is measured, in memory_n processes a schedule and one before, a
    # quarter of a minute each
    config.memory = ()
    config.memory_n = 1
    config.crossover = (4, 16)  # rollouts of each policy
    config.crossover_policies = 3
    config.remat = "full"  # memory is one of the things compared
    # of 8 policies four a pass: gradients of all at once are 80 MB, where one has 10
    config.max_tokens_per_pass = 256
    config.max_rows = 256
    config.eval = ConfigDict({"examples": 1, "samples": 1})
    config.policy = ConfigDict(
        {
            "env": {"name": "digit_sum"},
            "adapter": {"rank": 8, "alpha": 16.0},
            "optimizer": {"learning_rate": 1e-5},
            "loss": {"kind": "ppo"},
            "sampling": {"prompts": 1, "group_size": 4, "max_tokens": 8},
        }
    )
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.counts = (2,)
        config.waiting = config.memory = (2,)
        config.reward_s = 0.05
        config.stale_rewards = (0.05,)
        config.crossover = (2, 4)
        config.crossover_policies = 2
    elif size == "long":
        config.steps = 2
        config.schedules = ("sequential", "overlapped", "batched")
        config.waiting = config.memory = (3, 8)
        config.memory_n = 2
        config.crossover = (2, 4, 8, 16, 32)
    elif size == "stale":
        config.steps = 6
        config.counts = config.waiting = config.crossover = ()
        config.stale_rewards = (0.0, 0.2, 1.0)
    elif size != "default":
        raise ValueError(f"concurrent_grpo size {size!r}; expected default, ci, long or stale")
    return config
