"""Two small students learn what the quickstart's policies learned, from their own rollouts: a
teacher says of each sampled token how likely it is. Teacher and student share the resident base.

Command: python -m mint_jax.launch --config=configs/distill.py --workdir=runs/distill, after make
  quickstart
Without sampling: --config=configs/distill.py:stored, from the teachers' last rollouts
Hardware: two CPU cores; about three minutes.
"""

from ml_collections import ConfigDict


def _policy(env: str, teacher: str, rank: int, max_tokens: int) -> ConfigDict:
    sampling = {"prompts": 4, "group_size": 4, "max_tokens": max_tokens, "stop": ("\n",)}
    return ConfigDict(
        {
            "env": {"name": env},
            "adapter": {"rank": rank, "alpha": 2.0 * rank},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "max_grad_norm": 1.0},
            # k1 subtracts log p(student) - log p(teacher) from an advantage of 0: reverse KL
            "loss": {"kind": "ppo", "kl_kind": "k1", "kl": 1.0, "reference": teacher},
            "sampling": sampling | {"reward_weight": 0.0},
        }
    )


def _stored(teacher: str, rank: int) -> ConfigDict:
    return ConfigDict(
        {
            "data": {"rollouts": (teacher,), "min_reward": 1.0},
            "batch_size": 16,
            "adapter": {"rank": rank, "alpha": 2.0 * rank},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "max_grad_norm": 1.0},
        }
    )


def get_config(source: str = "own") -> ConfigDict:
    """``source``: ``own`` rollouts of the students, or those ``stored`` of their teachers."""
    config = ConfigDict()
    config.job = "grpo"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.seed = 0
    config.steps = 24
    config.schedule = "batched"
    config.catalog = "runs/quickstart/catalog"
    config.export_every = 24
    config.checkpoint = ConfigDict({"every": 8, "keep": 2})
    config.eval = ConfigDict({"examples": 24, "samples": 4})
    config.policies = ConfigDict(
        {
            "small_adder": _policy("digit_sum", "adder@latest", 2, 6),
            "small_bracket": _policy("bracket_word", "bracket@latest", 4, 8),
        }
    )
    if source == "stored":
        config.job = "sft"
        del config.schedule, config.eval
        config.policies = ConfigDict(
            {"stored_adder": _stored("adder", 2), "stored_bracket": _stored("bracket", 4)}
        )
    elif source != "own":
        raise ValueError(f"distill source {source!r}; expected own or stored")
    return config
