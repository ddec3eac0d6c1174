"""Two DPO policies over SmolLM2-135M-Instruct; the held-out reward margin of both rises from 0.

Command: python -m mint_jax.launch --config=configs/dpo/smollm2.py --workdir=runs/dpo
Data: --config.policies.<name>.data.path=pairs.jsonl replaces an environment's right and wrong
  answers.
Hardware: two CPU cores; about three minutes.
"""

from ml_collections import ConfigDict


def _policy(env: str, rank: int, learning_rate: float, beta: float) -> ConfigDict:
    return ConfigDict(
        {
            "data": {"env": env},
            "batch_size": 8,
            "loss": {"dpo_beta": beta},
            "adapter": {"rank": rank, "alpha": 2.0 * rank},
            "optimizer": {"learning_rate": learning_rate, "warmup_steps": 2},
        }
    )


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "dpo"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.seed = 0
    config.steps = 20
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    config.export_every = 20
    config.checkpoint = ConfigDict({"every": 10, "keep": 2})
    config.policies = ConfigDict(
        {
            "adder": _policy("digit_sum", 8, 2e-4, 0.1),
            "larger": _policy("larger_of_two", 16, 2e-4, 0.3),
        }
    )
    return config
