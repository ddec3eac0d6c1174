"""Drafts that idle rows verify (speculative decoding) against decoding token by token.

Command: python -m benchmarks --config=configs/bench/speculation.py --workdir=runs/bench/speculation
Default size: about ten minutes on two CPU cores.
Short: --config=configs/bench/speculation.py:ci
"""

from ml_collections import ConfigDict

TEXT = (
    "The river bends twice before it reaches the mill, and in spring the water climbs over the"
    " lower stones. Children from the village gather there after school to race boats made of bark."
    " The miller, who is old and a little deaf, pretends not to see them, but he keeps a box of"
    " spare sails beside the door. When the wind is from the north the boats go under the bridge."
)


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "speculation"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.seed = 0
    config.n = 5
    config.max_rows = 32
    config.drafts = 3
    config.adapters = 4
    config.rank = 16
    config.scale = 0.1  # of an adapter's delta, over its rank
    config.moved = 0.02
    config.tokens = 100
    config.cases = (  # task, temperature, numbers of rows
        ("again", 1.0, (1, 4, 8, 16, 24)),
        ("copy", 0.0, (8,)),
        ("group", 1.0, (8, 16)),
    )
    config.copy = "Repeat this text word by word, and nothing else:\n\n"
    config.text = TEXT
    config.again = "Write a short story about a dog who learns to sail."
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.max_rows = 8
        config.cases = (("again", 1.0, (2,)), ("copy", 0.0, (2,)), ("group", 1.0, (4,)))
        config.tokens = 16
    elif size != "default":
        raise ValueError(f"speculation size {size!r}; expected default or ci")
    return config
