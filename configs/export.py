"""A revision -> a PEFT adapter directory.

Command: python -m mint_jax.launch --config=configs/export.py --config.revision=runs/quickstart/revisions/DIGEST --config.output=DIR
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "export"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.quantise = ""  # "int8" or "float8": the matrices of the layers in 8 bits
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.revision = ""
    config.output = ""
    return config
