"""A PEFT adapter directory -> a revision of a policy.

Command: python -m mint_jax.launch --config=configs/import.py --config.input=DIR --config.policy=NAME --config.catalog=CATALOG
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "import"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.quantise = ""  # "int8" or "float8": the matrices of the layers in 8 bits
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.input = ""
    config.policy = ""  # its name in the catalog, NAME or TENANT/NAME
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    config.payloads = ""  # folder, s3:// or gs:// of the payloads; inside the catalog's folder by default
    return config
