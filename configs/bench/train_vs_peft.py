"""One step over four policies, and a mixed batch of four adapters, against torch + transformers + PEFT.

Command: python -m mint_jax.launch --config=configs/bench/train_vs_peft.py --workdir=runs/bench/train_vs_peft
Short:   --config=configs/bench/train_vs_peft.py:ci
Needs the ``bench`` extra. Default size: about ten minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.job = "bench"
    config.bench = "train_vs_peft"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 7
    config.policies = 4
    config.rows = 2
    config.tokens = 128
    config.rank = 8
    config.sample_rows = 8
    config.sample_prompt = 32
    config.sample_tokens = 32
    if size == "ci":
        config.n = 5
        config.tokens = 32
        config.sample_prompt = 16
        config.sample_tokens = 4
    elif size != "default":
        raise ValueError(f"train_vs_peft size {size!r}; expected default or ci")
    return config
