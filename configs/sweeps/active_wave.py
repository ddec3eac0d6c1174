"""1 to 1,024 distinct adapters in one batch of decoding, and 1 to 256 policies in one training
step, by rank.

Command: python -m benchmarks --config=configs/sweeps/active_wave.py:cpu
  --workdir=runs/sweeps/cpu/active_wave
Sizes: configs/sweeps/active_wave.py:ci, configs/sweeps/active_wave.py:cpu,
  configs/sweeps/active_wave.py:gpu, configs/sweeps/active_wave.py:pod
Size cpu: SmolLM2-135M, some 10 to 20 minutes on two CPU cores, 14 GB of memory; gpu: Qwen3-4B's
  shape, pod: Qwen3-30B-A3B's on all devices, random weights made there.
"""

from ml_collections import ConfigDict

MINT = "arXiv 2605.13779, Qwen3-30B-A3B rank 1, 4 GPUs, through the whole service"
BASES = {
    "ci": "tiny-random",
    "cpu": "smollm2-135m-instruct",
    "gpu": "random:qwen3-4b",
    "pod": "random:qwen3-30b-a3b",
}


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in BASES:
        raise ValueError(f"active_wave size {size!r}; expected ci, cpu, gpu or pod")
    large, tiny = size in ("gpu", "pod"), size == "ci"
    ranks = (1, 8) if tiny else (1, 8, 32)
    waves, policies = (
        ((1, 8), (1, 2))
        if tiny
        else ((1, 8, 64, 256, 1024), (1, 4, 16, 64, 256) if large else (4, 16, 64))
    )
    base = [f"--config.base={BASES[size]}", f"--config.dtype={'bfloat16' if large else 'float32'}"]
    base += ["--config.mesh.data=1", "--config.mesh.tensor=-1"] if size == "pod" else []
    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "active_wave"
    config.size = size
    config.claim = (
        "What a further distinct adapter costs a step of decoding, and a further policy a training"
        " step, at one number of rows."
    )
    decode = {
        "config": f"configs/bench/active_wave.py{':ci' if tiny else ''}",
        "about": (
            "Time of a step over one of the bare base with as many rows; bytes of the distinct"
            " adapters over the base's."
        ),
        "axes": {"rank": ranks[-1:] if tiny else ranks, "distinct": waves},
        # beyond them the adapters alone are 10 GB and more
        "without": (
            ()
            if large or tiny
            else (
                {"rank": 8, "distinct": 1024},
                {"rank": 32, "distinct": 256},
                {"rank": 32, "distinct": 1024},
            )
        ),
        "options": (
            *base,
            "--config.waves.small.rank={rank}",
            "--config.waves.small.counts=({distinct},)",
            "--config.waves.large.counts=()",
        ),
        "minutes": 0.2 if tiny else 0.8,
        "figures": {
            "overhead": "batches/name={distinct} of rank {rank}/overhead",
            "bytes_share": "batches/name={distinct} of rank {rank}/bytes_share",
            "rows": "batches/name={distinct} of rank {rank}/rows",
            "step_s": "batches/name={distinct} of rank {rank}/step_s",
            "errors": "batches/name={distinct} of rank {rank}/errors",
        },
    }
    train = {
        "config": f"configs/bench/train_wave.py{':ci' if tiny else ''}",
        "about": (
            "One step of P policies over one of a single policy with the same rows, and over"
            " as many steps of one policy each."
        ),
        "axes": {"rank": ranks[-1:] if tiny else ranks if large else (1, 8), "policies": policies},
        # a point takes one to two minutes; of another rank a few show that it hardly matters
        "without": (
            () if large or tiny else ({"rank": 1, "policies": 4}, {"rank": 1, "policies": 64})
        ),
        # rows of 16 tokens, which is what the shortest are padded to: with shorter ones a single
        # policy's would share rows
        "options": (
            *base,
            "--config.rank={rank}",
            "--config.policies={policies}",
            *(("--config.rows=64",) if size == "cpu" else ()),
        ),
        "minutes": 0.2 if tiny else 0.8 if large else 1.5,
        "figures": {
            "overhead": "overhead",
            "ratio_one_by_one": "ratio_one_by_one",
            "step_s": "seconds/together",
            "state_bytes": "state_bytes",
        },
    }
    config.grids = ConfigDict({"decode": decode, "train": train})
    if size == "cpu":  # as many rows, and five minutes
        options = (
            *base,
            "--config.rank={rank}",
            "--config.policies={policies}",
            "--config.rows=256",
        )
        many = train | {
            "axes": {"rank": (8,), "policies": (256,)},
            "without": (),
            "options": options,
            "minutes": 5.0,
        }
        config.grids.train_many = ConfigDict(many)
    config.references = ConfigDict(
        {
            "mint": {
                "who": "MinT",
                "source": MINT,
                "grid": "decode",
                "settings": {"rank": 1, "distinct": 64},
                "figures": {"request_p95_s": 1.41, "errors": 0},
                "note": "64 distinct adapters in one batch; the time is of a whole request",
            },
            "mint_train": {
                "who": "MinT",
                "source": MINT,
                "grid": "train",
                "settings": {"policies": 1},
                "figures": {"ratio_one_by_one": 1.0},
                "note": "does not batch policies in a step: several are several steps",
            },
        }
    )
    config.pictures = ConfigDict(
        {
            "decode": {
                "grid": "decode",
                "x": "distinct",
                "y": "overhead",
                "by": ("rank",),
                "log": "x",
            },
            "train": {
                "grid": "train",
                "x": "policies",
                "y": "ratio_one_by_one",
                "by": ("rank",),
                "log": "x",
            },
        }
    )
    return config
