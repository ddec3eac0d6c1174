"""Writes a base once in the layout of a mesh, for pods whose hosts read only their own shards; see
``mint_jax/recipes/convert.py``. The mesh's devices need not be here.

Command: python -m mint_jax.launch --config=configs/convert.py --workdir=runs/convert
--config.base=DIR --config.output=/shared/base --config.mesh.fsdp=16 --config.mesh.tensor=4
Then:    python -m mint_jax.launch --config=... --config.base=/shared/base
--config.dtype=bfloat16
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "convert"
    config.base = "smollm2-135m-instruct"
    config.output = ""  # a new directory; empty: WORKDIR/base
    config.dtype = "bfloat16"
    config.quantise = ""  # int8 or float8 stores the layers' matrices in 8 bits
    config.mesh = ConfigDict({"fsdp": 1, "expert": 1, "tensor": 1})
    return config
