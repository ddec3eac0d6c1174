"""Held-out rewards of adapters and of the bare base on one environment.

Command: python -m mint_jax.launch --config=configs/evaluate.py --config.catalog=runs/quickstart/catalog
         --config.adapters.policy=adder@latest
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "evaluate"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.quantise = ""  # "int8" or "float8": the matrices of the layers in 8 bits
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.catalog = ""  # a catalog's folder or its database's URL, for adapters that are named by revision
    config.payloads = ""  # where the payloads are, if not in that folder
    config.env = ConfigDict({"name": "digit_sum"})
    config.seed = 0
    config.examples = 30
    config.samples = 4
    # label -> policy@alias, policy@12, a digest, or a PEFT directory; "" is the base
    config.adapters = ConfigDict({"base": "", "policy": ""})
    config.sampling = ConfigDict()  # what is set here comes before the settings of a revision's own training
    config.sampling.max_tokens = placeholder(int)
    config.sampling.temperature = placeholder(float)
    config.sampling.top_k = placeholder(int)
    config.sampling.top_p = placeholder(float)
    config.sampling.stop = placeholder(tuple)
    config.max_rows = 64
    config.slots = 64  # adapters in one batch, and on the device at once
    return config
