"""A PEFT adapter directory -> a revision of a policy.

Command: python -m mint_jax.launch --config=configs/import.py --config.input=DIR --config.policy=NAME --config.catalog=CATALOG
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "import"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.input = ""
    config.policy = ""  # its name in the catalog, NAME or TENANT/NAME
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    return config
