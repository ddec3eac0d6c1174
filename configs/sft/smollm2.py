"""Two SFT policies learn two answer styles at once over SmolLM2-135M-Instruct; the held-out loss of both falls.

Command:  python -m mint_jax.launch --config=configs/sft/smollm2.py --workdir=runs/sft
Data:     --config.policies.<name>.data.path=rows.jsonl replaces an environment's prompts and answers.
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
    config.quantise = ""  # "int8" or "float8": the matrices of the layers in 8 bits
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.steps = 20
    config.remat = "names"
    config.max_tokens_per_pass = 16384
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    config.payloads = ""  # folder, s3:// or gs:// of the payloads; inside the catalog's folder by default
    config.tenant = "default"
    config.export_every = 20
    config.checkpoint = ConfigDict({"every": 10, "keep": 2})
    config.tensorboard = True
    config.policies = ConfigDict({"bracket": _policy("bracket_word", 8, 5e-4), "adder": _policy("digit_sum", 16, 5e-4)})
    return config
