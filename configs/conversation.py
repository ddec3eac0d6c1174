"""A policy learns to guess a number in three turns: each wrong guess is answered with higher or
lower. The tokens of all its turns are trained on; the answers are read only.

Command: python -m mint_jax.launch --config=configs/conversation.py --workdir=runs/conversation
Hardware: two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "grpo"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.seed = 0
    config.steps = 20
    config.export_every = 20
    config.eval = ConfigDict({"examples": 5, "samples": 8})
    config.policies = ConfigDict(
        {
            "guesser": {
                "env": {"name": "higher_lower", "guesses": 3},
                "adapter": {"rank": 8, "alpha": 16.0},
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "max_grad_norm": 1.0},
                "loss": {"kind": "ppo"},
                "sampling": {"prompts": 4, "group_size": 8, "max_tokens": 6, "max_turns": 3},
            }
        }
    )
    return config
