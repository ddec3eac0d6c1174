"""Four policies of one task in one run: two ranks at one rate, a rate ten times higher, and one
without room for an answer.

Command: python -m mint_jax.launch --config=configs/recipes/failures.py
  --workdir=runs/recipes/failures
Hardware: two CPU cores; about four minutes.
"""

from ml_collections import ConfigDict


def _policy(rank: int, rate: float, **sampling: int) -> dict:
    return {
        "env": {"name": "digit_sum"},
        "adapter": {"rank": rank, "alpha": 32.0},  # for all ranks, as one rate then serves them
        "optimizer": {"learning_rate": rate, "warmup_steps": 2},
        "loss": {"kind": "ppo"},
        "sampling": {"prompts": 4, "group_size": 8, "max_tokens": 6, "stop": ("\n",)} | sampling,
    }


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "grpo"
    config.base = "smollm2-135m-instruct"
    config.seed = 0
    config.steps = 8
    config.export_every = 8
    config.eval = ConfigDict({"examples": 16, "samples": 2})
    config.policies = ConfigDict(
        {
            "rank4": _policy(4, 3e-4),
            "rank64": _policy(64, 3e-4),
            "ten_times": _policy(4, 3e-3),  # ten times the rate
            "cut_off": _policy(4, 3e-4, max_tokens=1),  # no answer is that short
        }
    )
    return config
