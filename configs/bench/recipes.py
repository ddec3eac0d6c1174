"""Wall time to one held-out reward: GRPO, distillation on-policy and from stored rollouts.

Command: python -m benchmarks --config=configs/bench/recipes.py --workdir=runs/bench/recipes
Default size: about 11 minutes on two CPU cores. Short: --config=configs/bench/recipes.py:ci
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    if (tiny := size == "ci") == (size == "default"):
        raise ValueError(f"recipes size {size!r}; expected default or ci")
    config = ConfigDict({"bench": "recipes", "dtype": "float32"})
    config.base, config.n = ("tiny-random", 1) if tiny else ("smollm2-135m-instruct", 3)
    config.steps, config.every = (2, 1) if tiny else (12, 2)
    config.teacher_rank, config.student_rank, config.alpha = 64, 4, 32.0
    config.optimizer = ConfigDict({"learning_rate": 3e-4, "warmup_steps": 2})
    config.env = ConfigDict({"name": "digit_sum"})
    config.sampling = ConfigDict({"prompts": 4, "group_size": 8, "max_tokens": 6, "stop": ("\n",)})
    # min_reward and batch_size, of a step, are those of stored rollouts
    config.batch_size, config.min_reward, config.target = 32, *((0.0, 0.0) if tiny else (1.0, 0.8))
    config.examples, config.samples, config.slots = (1, 1, 8) if tiny else (24, 2, 8)
    return config
