"""Time that adapters add to a layer of routed experts, for 1, 8 and 64 policies, and against
``ragged_dot`` over (expert, slot).

Command: python -m benchmarks --config=configs/bench/moe_step.py --workdir=runs/bench/moe_step
Short:   --config=configs/bench/moe_step.py:ci
GPU:     --config=configs/bench/moe_step.py:gpu
Default size: a layer of Qwen3-30B-A3B with 64 x 32 tokens, five minutes on two CPU cores, 16 GB of
memory. :gpu has more tokens.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "moe_step"
    config.seed = 0
    config.n = 5
    config.rank = 8
    config.policies = (1, 8, 64)
    config.size = ConfigDict(
        {
            "layers": 1,
            "experts": 128,
            "per_token": 8,
            "d_model": 2048,
            "width": 768,
            "rows": 64,
            "tokens": 32,
        }
    )
    config.ragged_policies = 8
    config.ragged = ConfigDict(
        {
            "layers": 1,
            "experts": 32,
            "per_token": 8,
            "d_model": 512,
            "width": 192,
            "rows": 8,
            "tokens": 16,
        }
    )
    config.decode = ConfigDict(
        {
            "layers": 6,
            "experts": 64,
            "per_token": 4,
            "d_model": 512,
            "width": 384,
            "rows": (1, 8, 32),
        }
    )
    if size == "ci":
        config.n = 2
        config.policies = (1, 8)
        config.ragged_policies = 4
        config.size.update(
            {"experts": 8, "per_token": 2, "d_model": 64, "width": 48, "rows": 16, "tokens": 8}
        )
        config.ragged.update({"experts": 8, "per_token": 2, "d_model": 64, "width": 48})
        config.decode.update(
            {"layers": 2, "experts": 8, "d_model": 64, "width": 48, "rows": (1, 4)}
        )
    elif size == "gpu":
        config.size.tokens = 256
    elif size != "default":
        raise ValueError(f"moe_step size {size!r}; expected default, ci or gpu")
    return config
