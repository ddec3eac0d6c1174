"""A policy learns to write the person of a sentence as JSON; the reward counts the right fields.
Held out it rises from 0.39 to 0.93, in about 18 minutes on a
busy machine.

Command: python -m mint_jax.launch --config=configs/recipes/json_extraction.py
  --workdir=runs/recipes/json_extraction
Hardware: two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "grpo"
    config.base = "smollm2-135m-instruct"
    config.seed = 0
    config.steps = 12
    config.export_every = 12
    config.eval = ConfigDict({"examples": 20, "samples": 4})
    config.policies = ConfigDict(
        {
            "extractor": {
                "env": {"name": "json_fields"},
                "adapter": {"rank": 16, "alpha": 32.0},
                "optimizer": {"learning_rate": 5e-4, "warmup_steps": 2},
                "loss": {"kind": "ppo"},
                "sampling": {"prompts": 4, "group_size": 8, "max_tokens": 32},
            }
        }
    )
    return config
