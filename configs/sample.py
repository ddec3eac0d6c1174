"""Completions of given prompts, JSONL to JSONL; see ``mint_jax/recipes/sample.py`` for the lines.

Command: python -m mint_jax.launch --config=configs/sample.py --config.base=DIR
  --config.input=F.jsonl --config.output=G.jsonl
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "sample"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    # a catalog's folder or its database's URL, for adapters that are named by revision
    config.catalog = ""
    config.slots = 64  # adapters on the device at once, of each rank bucket; more take turns
    config.input = ""
    config.output = ""
    # and what else a line may set: see --help
    config.sampling = ConfigDict({"max_tokens": 64, "temperature": 1.0})
    return config
