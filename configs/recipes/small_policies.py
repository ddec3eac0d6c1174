"""Policies of biases alone, and of an output basis that they share, beside LoRA of ranks 8 and 1,
on one task in one run: reward by bytes.

Command: python -m mint_jax.launch --config=configs/recipes/small_policies.py
  --workdir=runs/recipes/small_policies
Hardware: two CPU cores; about 15 minutes.
"""

from ml_collections import ConfigDict

BASIS = {"kind": "basis", "rank": 1, "alpha": 16.0}


def _policy(adapter: dict, rate: float) -> dict:
    return {
        "env": {"name": "digit_sum"},
        "adapter": adapter,
        "optimizer": {"learning_rate": rate, "warmup_steps": 2},
        "loss": {"kind": "ppo"},
        "sampling": {"prompts": 4, "group_size": 8, "max_tokens": 6, "stop": ("\n",)},
    }


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "grpo"
    config.base = "smollm2-135m-instruct"
    config.seed = 0
    config.steps = 12
    config.export_every = 12
    config.eval = ConfigDict({"examples": 16, "samples": 4})
    config.policies = ConfigDict(
        {
            "rank8": _policy({"rank": 8, "alpha": 32.0}, 3e-4),  # 9.77 MB
            "rank1": _policy({"rank": 1, "alpha": 32.0}, 3e-4),  # 1.22 MB
            "bias": _policy({"kind": "bias"}, 1e-3),  # 0.62 MB
            "bias_o_down": _policy({"kind": "bias", "targets": ("o", "down")}, 1e-3),  # 0.14 MB
            "bias_o": _policy({"kind": "bias", "targets": ("o",)}, 2e-3),  # 0.07 MB
            "bias_v": _policy({"kind": "bias", "targets": ("v",)}, 2e-3),  # 0.02 MB
            "basis": _policy(BASIS, 1e-3),  # 0.60 MB
            "basis_o": _policy(BASIS | {"targets": ("o",)}, 2e-3),  # 0.07 MB
        }
    )
    return config
