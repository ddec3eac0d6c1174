"""Bundles of the TPU compiler's static schedule that packed LoRA adds to a tile of rows, over those
of the base's own product.

Command: python -m benchmarks --config=configs/bench/schedule.py --workdir=runs/bench/schedule
One chip: --config=configs/bench/schedule.py:ci
Needs the ``tpu-aot`` extra and no accelerator; a minute on two CPU cores, 60 MB of dumps left in
the workdir.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "schedule"
    chips = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
    config.chips = chips[:1] if size == "ci" else chips
    return config
