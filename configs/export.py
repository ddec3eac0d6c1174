"""A revision -> a PEFT adapter directory.

Command: python -m mint_jax.launch --config=configs/export.py --config.catalog=runs/quickstart/catalog
         --config.revision=adder@latest --config.output=DIR
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "export"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.catalog = ""  # a catalog's folder or its database's URL, for adapters that are named by revision
    config.revision = ""  # policy@alias, policy@12, a digest, or a PEFT directory
    config.output = ""
    return config
