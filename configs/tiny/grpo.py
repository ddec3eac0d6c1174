"""Three concurrent GRPO policies on a random two-layer model: every part of the job in seconds;
nothing is learned.

Command: python -m mint_jax.launch --config=configs/tiny/grpo.py --workdir=runs/tiny/grpo
"""

from ml_collections import ConfigDict


def _policy(env: str, rank: int, loss: dict) -> ConfigDict:
    return ConfigDict(
        {
            "env": {"name": env},
            "adapter": {"rank": rank, "alpha": 2.0 * rank},
            "optimizer": {"learning_rate": 1e-3},
            "loss": loss,
            "sampling": {"prompts": 2, "group_size": 2, "max_tokens": 4},
        }
    )


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "grpo"
    config.base = "tiny-random"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.steps = 4
    config.schedule = "batched"
    config.reward_workers = 2
    config.max_tokens_per_pass = 4096
    config.max_rows = 64
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    config.export_every = 2
    config.checkpoint = ConfigDict({"every": 2, "keep": 2})
    config.eval = ConfigDict({"examples": 2, "samples": 2})
    config.policies = ConfigDict(
        {
            "ppo": _policy("digit_sum", 1, {"kind": "ppo", "kl_kind": "k3", "kl": 0.01}),
            "cispo": _policy("copy_word", 4, {"kind": "cispo", "clip_high": 0.28}),
            "reinforce": _policy(
                "larger_of_two", 3, {"kind": "reinforce", "kl_kind": "k1", "kl": 0.01}
            ),
        }
    )
    return config
