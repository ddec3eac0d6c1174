"""Learning rates by rank, and failures to know: eight policies learn one task in one run.

Command: python -m mint_jax.launch --config=configs/recipes/rates.py --workdir=runs/recipes/rates
Hardware: two CPU cores.
"""

from ml_collections import ConfigDict


def _policy(rank: int, rate: float, **sampling: float) -> dict:
    return {
        "env": {"name": "digit_sum"},
        "adapter": {"rank": rank, "alpha": 32.0},  # of all ranks: one rate then serves all
        "optimizer": {"learning_rate": rate, "warmup_steps": 2},
        "loss": {"kind": "ppo"},
        "sampling": {"prompts": 4, "group_size": 8, "max_tokens": 6, "stop": ("\n",)} | sampling,
    }


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "grpo"
    config.base = "smollm2-135m-instruct"
    config.seed = 0
    config.steps = 10
    config.export_every = 10
    config.eval = ConfigDict({"examples": 16, "samples": 2})
    config.policies = ConfigDict(
        {
            **{f"rank4_{rate}": _policy(4, float(rate)) for rate in ("3e-5", "3e-4", "3e-3")},
            "cut_off": _policy(4, 3e-4, max_tokens=1),  # no answer is that short
            **{f"rank64_{rate}": _policy(64, float(rate)) for rate in ("3e-5", "3e-4", "3e-3")},
            "cold": _policy(4, 3e-4, temperature=0.1),  # samples of a prompt are alike
        }
    )
    return config
