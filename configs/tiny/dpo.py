"""Two DPO policies on a random two-layer model: every part of the job in seconds.

Command: python -m mint_jax.launch --config=configs/tiny/dpo.py --workdir=runs/tiny/dpo
"""

from ml_collections import ConfigDict


def _policy(env: str, rank: int) -> ConfigDict:
    return ConfigDict(
        {
            "data": {"env": env},
            "batch_size": 4,
            "adapter": {"rank": rank, "alpha": 2.0 * rank},
            "optimizer": {"learning_rate": 1e-2},
        }
    )


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "dpo"
    config.base = "tiny-random"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.steps = 6
    config.max_tokens_per_pass = 4096
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    config.export_every = 3
    config.checkpoint = ConfigDict({"every": 3, "keep": 2})
    config.tensorboard = False
    config.policies = ConfigDict(
        {"adder": _policy("digit_sum", 2), "bracket": _policy("bracket_word", 5)}
    )
    return config
