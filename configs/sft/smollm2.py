"""Two SFT policies learn two answer styles at once over SmolLM2-135M-Instruct; the held-out loss of
both falls.

Command: python -m mint_jax.launch --config=configs/sft/smollm2.py --workdir=runs/sft
Data: --config.policies.<name>.data.path=rows.jsonl replaces an environment's prompts and answers.
Hardware: two CPU cores; about two minutes.
"""

from ml_collections import ConfigDict


def _policy(env: str, rank: int, learning_rate: float) -> ConfigDict:
    return ConfigDict(
        {
            "data": {"env": env},
            "batch_size": 8,
            "adapter": {"rank": rank, "alpha": 2.0 * rank},
            "optimizer": {
                "learning_rate": learning_rate,
                "warmup_steps": 2,
                "total_steps": 20,
                "schedule": "cosine",
                "final_fraction": 0.1,
            },
        }
    )


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "sft"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.seed = 0
    config.steps = 20
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    config.export_every = 20
    config.checkpoint = ConfigDict({"every": 10, "keep": 2})
    config.policies = ConfigDict(
        {"bracket": _policy("bracket_word", 8, 5e-4), "adder": _policy("digit_sum", 16, 5e-4)}
    )
    return config
