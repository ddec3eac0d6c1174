"""A PEFT adapter directory -> a revision.

Command: python -m mint_jax.launch --config=configs/import.py --config.input=DIR --config.revisions=ROOT
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
    config.revisions = ""  # where revisions are kept; WORKDIR/revisions by default
    return config
