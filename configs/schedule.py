"""Bundles of the TPU compiler's static schedule that packed LoRA adds to a tile of rows, over those
of the base's own product.

Command: python -m mint_jax.launch --config=configs/schedule.py --workdir=runs/schedule
One chip: --config.chips="('v5e:2x2',)"
Needs the ``tpu-aot`` extra and no accelerator; a minute on two CPU cores, 60 MB of dumps left in
the workdir.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "schedule"
    config.chips = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
    return config
