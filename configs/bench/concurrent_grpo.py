"""GRPO of 3 and of 8 policies over one base: one after another, overlapped, batched; and where batching stops to pay.

Command: python -m mint_jax.launch --config=configs/bench/concurrent_grpo.py --workdir=runs/bench/concurrent_grpo
Short:   --config=configs/bench/concurrent_grpo.py:ci
Default size: about half an hour on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.job = "bench"
    config.bench = "concurrent_grpo"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.steps = 2
    config.counts = (3, 8)
    config.reward_s = 1.0
    config.crossover = (2, 4, 8, 16, 32)
    config.crossover_policies = 4
    config.remat = "full"  # memory is one of the things compared
    config.max_tokens_per_pass = 16384
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
        config.steps = 1
        config.reward_s = 0.05
        config.crossover = (2, 8)
    elif size != "default":
        raise ValueError(f"concurrent_grpo size {size!r}; expected default or ci")
    return config
