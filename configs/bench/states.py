"""A training step and decoding of a base with states (Qwen3.5's pattern) against a dense one, per
FLOP.

Command: python -m benchmarks --config=configs/bench/states.py --workdir=runs/bench/states
Short: --config=configs/bench/states.py:ci
Default size: widths of Qwen3.5-4B divided by 4, four layers.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "states"
    config.seed = 0
    config.n = 5
    config.rank = 8
    config.rows = 4
    config.tokens = 127  # of each row, behind its first
    config.common = ConfigDict(
        {
            "vocab_size": 4096,
            "hidden_size": 640,
            "intermediate_size": 2304,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
        }
    )
    config.dense = ConfigDict({"architectures": ["Qwen3ForCausalLM"]})
    config.hybrid = ConfigDict(
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        }
    )
    if size == "ci":
        config.n = 2
        config.rows = 2
        config.tokens = 32
        config.common.update({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48})
        config.common.update({"num_hidden_layers": 4, "head_dim": 16})
        config.hybrid.update({"linear_key_head_dim": 8, "linear_value_head_dim": 8})
    elif size != "default":
        raise ValueError(f"states size {size!r}; expected default or ci")
    return config
