"""Three policies learn three tasks of reasoning-gym in one run: sums of two digits, letters of a
text, and words spelled backwards. In 24 steps the held-out reward of letters rises from 0.00 to
0.44 (one seed); those of sums (0.02 to 0.05) and words (0.06 to 0.08) hardly move.

Command: python -m mint_jax.launch --config=configs/recipes/reasoning_gym.py
  --workdir=runs/recipes/reasoning_gym
Hardware: two CPU cores. Needs the ``data`` extra.
"""

from ml_collections import ConfigDict

TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "letter_counting": {"min_words": 2, "max_words": 3},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
}


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "grpo"
    config.base = "smollm2-135m-instruct"
    config.seed = 0
    config.steps = config.export_every = 24
    config.eval = ConfigDict({"examples": 16, "samples": 2})
    config.policies = ConfigDict(
        {
            task: {
                "env": {"name": "reasoning_gym", "task": task, **options},
                "adapter": {"rank": 16, "alpha": 32.0},
                "optimizer": {"learning_rate": 5e-4, "warmup_steps": 2},
                "loss": {"kind": "ppo"},
                "sampling": {"prompts": 4, "group_size": 8, "max_tokens": 12},
            }
            for task, options in TASKS.items()
        }
    )
    return config
