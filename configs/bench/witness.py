"""Faults of serving adapters, and the tokens until the audit of witnessed tokens finds them.

Command: python -m benchmarks --config=configs/bench/witness.py --workdir=runs/bench/witness
Default size: about an hour on two CPU cores. Short: --config=configs/bench/witness.py:ci
"""

from ml_collections import ConfigDict

PROMPTS = (
    "You are given two digits. What is the sum of 3 and 5? Explain each step in plain words.",
    "Write a short story about a dog who learns to sail along the coast with an old fisherman.",
    "Give me three reasons why bread needs salt, and tell me what happens to it without any.",
    "Describe how a bicycle stays upright while it moves, for a curious child of eight years.",
    "Which is larger, 17 or 71? Answer with the number and then say how you compared the two.",
    "List the steps to plant a tomato in a pot on a balcony that has sun only in the morning.",
)


def get_config(size: str = "default") -> ConfigDict:
    if (tiny := size == "ci") == (size == "default"):
        raise ValueError(f"witness size {size!r}; expected default or ci")
    config = ConfigDict({"bench": "witness", "dtype": "float32", "seed": 0})
    config.base = "tiny-random" if tiny else "smollm2-135m-instruct"
    config.n = 3 if tiny else 24  # answers of each fault
    config.steps = 3 if tiny else 10  # updates, each with a revision
    config.rank = 4 if tiny else 16
    config.optimizer = ConfigDict({"learning_rate": 3e-2 if tiny else 3e-4})
    # random weights earn no reward, but their entropy has a gradient
    config.loss = ConfigDict({"kind": "ppo", "entropy": -1.0 if tiny else 0.0})
    config.sampling = ConfigDict({"prompts": 4, "group_size": 8, "max_tokens": 6, "stop": ("\n",)})
    if tiny:
        config.sampling.prompts = config.sampling.group_size = 2
    config.prompts = PROMPTS
    config.tokens = 16 if tiny else 64  # of an answer
    config.temperature = 1.0
    config.max_rows = 4 if tiny else 32
    config.alternatives = 4
    config.honest = 200 if tiny else 100_000  # tokens
    config.run_tokens = 8 if tiny else 32
    config.each = 50  # an audit of one answer in 50
    config.audited = 1 if tiny else 4  # together
    config.cost_n = 1 if tiny else 3
    return config
