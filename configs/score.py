"""Log-probabilities of given token sequences or texts, JSONL to JSONL; see
``mint_jax/recipes/score.py`` for the lines.

Command: python -m mint_jax.launch --config=configs/score.py --config.base=DIR
  --config.input=F.jsonl --config.output=G.jsonl
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "score"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    # a catalog's folder or its database's URL, for adapters that are named by revision
    config.catalog = ""
    config.slots = 64  # adapters on the device at once, of each rank bucket; more take turns
    config.input = ""
    config.output = ""
    config.max_tokens = 4096  # tokens of a batch, padding included
    return config
