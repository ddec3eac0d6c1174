"""From an optimizer step to the next tokens by four paths, over ranks and bases: bytes, seconds,
steps of 64 and 304 tokens.

Command: python -m benchmarks --config=configs/sweeps/handoff.py:cpu
  --workdir=runs/sweeps/cpu/handoff
Sizes: configs/sweeps/handoff.py:ci, configs/sweeps/handoff.py:cpu, configs/sweeps/handoff.py:gpu,
  configs/sweeps/handoff.py:pod
Size cpu: SmolLM2-135M, and one of Qwen3-4B's 36 layers and of Qwen3-30B-A3B's 48, each with as
  large a part of its vocabulary, so that bytes are in the whole base's proportions; 10 to 20
  minutes on two CPU cores. gpu and pod: all of it in bfloat16, made on the device.
"""

from ml_collections import ConfigDict

MINT = "arXiv 2605.13779, through its service"
PATHS = ("merged_disk", "merged_memory", "adapter_disk", "adapter_memory")
DENSE = {"name": "Qwen3-4B", "all_layers": 36}
SPARSE = {
    "name": "Qwen3-30B-A3B",
    "all_layers": 48,
    "d_model": 2048,
    "num_heads": 32,
    "num_kv_heads": 4,
    "head_dim": 128,
    "d_ff": 768,
    "experts": 128,
    "per_token": 8,
}
TINY_SPARSE = {
    "d_model": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "d_ff": 32,
    "experts": 4,
    "per_token": 2,
}
# of the dense base, of the sparse one
LAYERS = {"ci": (1, 1), "cpu": (1, 1), "gpu": (36, 12), "pod": (36, 48)}
# at cpu 151,936 over 36 and over 48, in whole lanes
VOCABULARY = {
    "ci": (512, 512),
    "cpu": (4224, 3200),
    "gpu": (151936, 151936),
    "pod": (151936, 151936),
}


def _grid(
    config: str, about: str, ranks: tuple, where: str, tokens: tuple, options: tuple, minutes: float
) -> dict:
    steps = {f"step_{count}_s": f"{where}steps/{count}/seconds/{{path}}" for count in tokens}
    ratios = {f"step_{count}_ratio": f"{where}steps/{count}/ratios/{{path}}" for count in tokens}
    return {
        "config": config,
        "about": about,
        "axes": {"rank": ranks},
        "options": options,
        "minutes": minutes,
        "each": {"path": PATHS},
        "figures": {
            "bytes": f"{where}bytes/{{path}}",
            "handoff_s": f"{where}handoff_s/{{path}}",
            "to_first_token_s": f"{where}to_first_token_s/{{path}}",
            "handoff_ratio": f"{where}ratios/{{path}}",
            **steps,
            **ratios,
        },
    }


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in LAYERS:
        raise ValueError(f"handoff size {size!r}; expected ci, cpu, gpu or pod")
    tiny, whole = size == "ci", size in ("gpu", "pod")
    bench = f"configs/bench/handoff.py{':ci' if tiny else ''}"
    ranks = (4,) if tiny else (1, 4, 16, 64)
    tokens = (4, 8) if tiny else (64, 304)
    # a token takes a CPU 60 ms, so that four paths of 304 tokens take 80 s a round and more than
    # all handoffs together
    few, large_ranks = ((2,), (1, 16)) if size == "cpu" else (tokens, ranks)
    fives = f"--config.n={2 if tiny else 5}"

    def smollm2(counts: tuple, n: str) -> tuple:
        settings = (
            f"--config.new_tokens={counts[0]}",
            f"--config.more_tokens={counts[1:]}",
            "--config.rank={rank}",
        )
        return ("--config.parts=('base',)", n, *settings)

    def shape(fields: dict, layers: int, vocabulary: int) -> tuple:
        settings = fields | {
            "layers": layers,
            "vocab_size": vocabulary,
            "new_tokens": few[0],
            "more_tokens": few[1:],
        }
        settings |= {"dtype": "bfloat16"} if whole else {}
        return (
            "--config.parts=('large',)",
            fives,
            *(f"--config.shape.{k}={v}" for k, v in settings.items()),
            "--config.shape.rank={rank}",
        )

    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "handoff"
    config.size = size
    config.claim = (
        "Handing an adapter over costs its own bytes, a merged checkpoint those of the base; ratios"
        " are over the merged checkpoint."
    )
    about = (
        "{} of {} layers, {} words, random weights; a handoff ends when the weights to sample with"
        " are ready."
    )
    layers, words = LAYERS[size], VOCABULARY[size]
    minutes = 0.3 if tiny else 1.5
    of_smollm2 = "SmolLM2-135M-Instruct."
    dense, sparse = (
        shape(DENSE, layers[0], words[0]),
        shape(SPARSE | (TINY_SPARSE if tiny else {}), layers[1], words[1]),
    )
    grids = {
        "smollm2": _grid(bench, of_smollm2, ranks, "", few, smollm2(few, fives), minutes),
        "qwen3_4b": _grid(
            bench, about.format(layers[0], 36, words[0]), large_ranks, "large/", few, dense, minutes
        ),
        "qwen3_30b_a3b": _grid(
            bench,
            about.format(layers[1], 48, words[1]),
            large_ranks,
            "large/",
            few,
            sparse,
            minutes,
        ),
    }
    if size == "cpu":
        grids["smollm2_steps"] = _grid(
            bench, of_smollm2, ranks[2:3], "", tokens, smollm2(tokens, "--config.n=3"), 8.0
        )
    config.grids = ConfigDict(grids)
    config.references = ConfigDict(
        {
            "mint_4b_adapter": {
                "who": "MinT",
                "source": MINT,
                "grid": "qwen3_4b",
                "settings": {"rank": 32, "path": "adapter_disk"},
                "figures": {
                    "bytes": 252 << 20,
                    "handoff_s": 0.036,
                    "to_first_token_s": 4.15,
                    "step_64_ratio": 18.3,
                },
                "note": (
                    "load, then a cold first sample of 4.114 s; 15.57 tokens/s; the ratio is of its"
                    " whole step"
                ),
            },
            "mint_4b_merged": {
                "who": "MinT",
                "source": MINT,
                "grid": "qwen3_4b",
                "settings": {"rank": 32, "path": "merged_disk"},
                "figures": {
                    "bytes": 8_061_000_000,
                    "handoff_s": 71.82,
                    "to_first_token_s": 127.52,
                    "step_64_ratio": 1.0,
                },
                "note": (
                    "load, then a cold first sample of 55.70 s; 4.70 tokens/s in all, 20.60 warm"
                ),
            },
            "mint_30b_adapter": {
                "who": "MinT",
                "source": MINT,
                "grid": "qwen3_30b_a3b",
                "settings": {"rank": 16, "path": "adapter_disk"},
                "figures": {
                    "bytes": 1_692_000_000,
                    "handoff_s": 46.46,
                    "to_first_token_s": 163.76,
                    "step_64_ratio": 2.85,
                },
                "note": "load, then a cold first sample of 117.3 s",
            },
            "mint_30b_merged": {
                "who": "MinT",
                "source": MINT,
                "grid": "qwen3_30b_a3b",
                "settings": {"rank": 16, "path": "merged_disk"},
                "figures": {
                    "bytes": 61_080_000_000,
                    "handoff_s": 402.2,
                    "to_first_token_s": 558.3,
                    "step_64_ratio": 1.0,
                },
                "note": "load, then a cold first sample of 156.1 s",
            },
            "miles": {
                "who": "Miles",
                "source": "its own report of an adapter's export from trainer to sampler",
                "grid": "qwen3_30b_a3b",
                "settings": {"path": "adapter_disk"},
                "figures": {"handoff_s": 5.29},
                "note": "66 % of the trainer's time; base and rank are its own",
            },
        }
    )
    config.pictures = ConfigDict(
        {
            name: {"grid": name, "x": "rank", "y": "handoff_s", "by": ("path",), "log": "xy"}
            for name in ("smollm2", "qwen3_4b", "qwen3_30b_a3b")
        }
    )
    return config
