"""Completions of given prompts, JSONL to JSONL; see ``mint_jax/jobs/sample.py`` for the lines.

Command: python -m mint_jax.launch --config=configs/sample.py --config.base=DIR --config.input=F.jsonl --config.output=G.jsonl
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "sample"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.quantise = ""  # "int8" or "float8": the matrices of the layers in 8 bits
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.catalog = ""  # a catalog's folder or its database's URL, for adapters that are named by revision
    config.payloads = ""  # where the payloads are, if not in that folder
    config.slots = 64  # adapters on the device at once, of each rank bucket; more take turns
    config.input = ""
    config.output = ""
    config.max_rows = 64
    config.sampling = ConfigDict(
        {"max_tokens": 64, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "n": 1, "stop": (), "stop_ids": ()}
    )
    return config
