"""Revisions in packs against an Orbax checkpoint each, and TensorStore's zarr3 and OCDBT: bytes,
files, export, cold load; folder and S3.

Command: python -m benchmarks --config=configs/bench/revision_stores.py
--workdir=runs/bench/revision_stores Short:   --config=configs/bench/revision_stores.py:ci S3 is
moto's server on loopback (`pip install 'moto[server]' boto3`); without it the report says that S3
was not measured. Default size: under five minutes on two CPU cores, 1 GB of disk (removed at the
end).
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "revision_stores"
    config.seed = 0
    config.n = 5  # rounds; in each every store has its turn
    config.entries = 10_000  # revisions
    # of them, those that the stores beside packs get: they take so much longer
    config.others = 1_000
    config.loads = 20  # cold loads of a round
    config.s3 = ConfigDict({"entries": 10_000, "others": 50, "loads": 5})
    # all seven projections: 14 arrays
    config.shape = ConfigDict({"layers": 2, "d_model": 256, "rank": 1})
    if size == "ci":
        config.entries, config.others, config.loads = 50, 50, 5
        config.s3.update({"entries": 50, "others": 10, "loads": 2})
    elif size != "default":
        raise ValueError(f"revision_stores size {size!r}; expected default or ci")
    return config
