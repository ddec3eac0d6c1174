"""Held-out rewards of adapters and of the bare base on one environment.

Command: python -m mint_jax.launch --config=configs/evaluate.py
  --config.catalog=runs/quickstart/catalog --config.adapters.policy=adder@latest
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "evaluate"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    # a catalog's folder or its database's URL, for adapters that are named by revision
    config.catalog = ""
    config.env = ConfigDict({"name": "digit_sum"})
    config.seed = 0
    config.examples = 30
    config.samples = 4
    # label -> policy@alias, policy@12, a digest, or a PEFT directory; "" is the base
    config.adapters = ConfigDict({"base": "", "policy": ""})
    # a revision is sampled as it was trained; --config.sampling.temperature=... and its like come
    # before that
    config.slots = 64  # adapters in one batch, and on the device at once
    return config
