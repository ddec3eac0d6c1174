"""GRPO of 1 to 32 policies over one base: one after another, overlapped, batched, where rewards
take no time, 0.2 s and 1 s.

Command: python -m benchmarks --config=configs/sweeps/concurrent_grpo.py:cpu
  --workdir=runs/sweeps/cpu/concurrent_grpo
Sizes: configs/sweeps/concurrent_grpo.py:ci, configs/sweeps/concurrent_grpo.py:cpu,
  configs/sweeps/concurrent_grpo.py:gpu, configs/sweeps/concurrent_grpo.py:pod
Size cpu: SmolLM2-135M, one step of 4 rollouts of 8 tokens each; 10 to 25 minutes on two CPU
  cores. gpu and pod have longer ones, of Qwen3-4B's and Qwen3-30B-A3B's shape with random weights
  made on the devices.
"""

from ml_collections import ConfigDict

BASES = {
    "ci": "tiny-random",
    "cpu": "smollm2-135m-instruct",
    "gpu": "random:qwen3-4b",
    "pod": "random:qwen3-30b-a3b",
}
SCHEDULES = ("sequential", "overlapped", "batched")
MINT = "arXiv 2605.13779, concurrent GRPO of three policies over one base"


def _series(where: str) -> dict:
    return {
        "wall_s": f"policies_{{policies}}/{where}/seconds/{{schedule}}",
        "device_busy": f"policies_{{policies}}/{where}/busy/{{schedule}}",
        "speedup": f"policies_{{policies}}/{where}/speedup/{{schedule}}",
    }


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in BASES:
        raise ValueError(f"concurrent_grpo size {size!r}; expected ci, cpu, gpu or pod")
    tiny, large = size == "ci", size in ("gpu", "pod")
    bench = f"configs/bench/concurrent_grpo.py{':ci' if tiny else ''}"
    shared = (
        f"--config.base={BASES[size]}",
        f"--config.dtype={'bfloat16' if large else 'float32'}",
        f"--config.n={2 if tiny else 5 if large else 3}",
        *(("--config.mesh.tensor=-1",) if size == "pod" else ()),
        *(
            (
                "--config.policy.sampling.max_tokens=256",
                "--config.policy.sampling.prompts=8",
                "--config.steps=2",
            )
            if large
            else ()
        ),
    )
    alone = (
        "--config.counts=()",
        "--config.waiting=()",
        "--config.memory=()",
        "--config.crossover=()",
    )
    all_three = "--config.schedules=('sequential','overlapped','batched')"
    many = (2,) if tiny else (1, 2, 4, 8, 16, 32)
    few = (2,) if tiny else many if large else (4, 8)
    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "concurrent_grpo"
    config.size = size
    config.claim = (
        "Steps of several policies in one program take less than one after another; overlapping"
        " gains where rewards are waited for."
    )
    config.grids = ConfigDict(
        {
            "rewards_at_once": {
                "config": bench,
                "about": (
                    "Rewards take microseconds; speedup is over the policies one after another."
                ),
                "axes": {"policies": many},
                "options": (*shared, *alone, "--config.counts=({policies},)", all_three),
                "minutes": 0.3 if tiny else 1.2,
                "each": {"schedule": SCHEDULES},
                "figures": _series("rewards_at_once"),
            },
            "rewards_waiting": {
                "config": bench,
                "about": ("A reward takes reward_s seconds, of a verifier elsewhere."),
                "axes": {"policies": few, "reward_s": (0.05,) if tiny else (0.2, 1.0)},
                "options": (
                    *shared,
                    *alone,
                    "--config.waiting=({policies},)",
                    "--config.reward_s={reward_s}",
                ),
                "minutes": 0.3 if tiny else 1.5,
                "each": {"schedule": SCHEDULES},
                "figures": _series("rewards_waiting"),
            },
            "crossover": {
                "config": bench,
                "about": (
                    "Sequential over batched time of a few policies, by the rollouts of each: where"
                    " batching stops to pay."
                ),
                "axes": {"rollouts": (2,) if tiny else (2, 4, 8, 16, 32) if large else (2, 8, 32)},
                "options": (*shared, *alone, "--config.crossover=({rollouts},)"),
                "minutes": 0.3 if tiny else 0.6,
                "figures": {
                    "speedup": "crossover/rollouts={rollouts}/ratio",
                    "tokens_per_policy": "crossover/rollouts={rollouts}/sampled_tokens_per_policy",
                },
            },
            "memory": {
                "config": bench,
                "about": "Peak memory of a schedule in a process of its own.",
                "axes": {"policies": (2,) if tiny else (8,) if size == "cpu" else many},
                "options": (
                    *shared,
                    *alone,
                    "--config.memory=({policies},)",
                    f"--config.memory_n={1 if tiny else 2}",
                ),
                "minutes": 0.3 if tiny else 1.0,
                "each": {"schedule": ("sequential", "batched")},
                "figures": {"peak_bytes": "memory_{policies}/peak_bytes/{schedule}"},
            },
        }
    )

    def reported(
        who: str, source: str, grid: str, settings: dict, figures: dict, note: str
    ) -> dict:
        return {
            "who": who,
            "source": source,
            "grid": grid,
            "settings": settings,
            "figures": figures,
            "note": note,
        }

    three = {"policies": 3, "schedule": "overlapped"}
    config.references = ConfigDict(
        {
            "mint_4b": reported(
                "MinT 4B",
                MINT,
                "rewards_waiting",
                three,
                {"speedup": 1.77, "wall_s": 1736.1},
                "3081.2 s one after another",
            ),
            "mint_30b": reported(
                "MinT 30B",
                MINT,
                "rewards_waiting",
                three,
                {"speedup": 1.45, "wall_s": 7008},
                "10,130 s one after another",
            ),
            "mint_4b_memory": reported(
                "MinT 4B",
                MINT,
                "memory",
                three,
                {"peak_bytes": 65.6 * 2**30},
                "the same one after another",
            ),
            "mint_30b_memory": reported(
                "MinT 30B",
                MINT,
                "memory",
                three,
                {"peak_bytes": 68.0 * 2**30},
                "the same one after another",
            ),
            "c_lora": reported(
                "C-LoRA",
                "its own report",
                "rewards_at_once",
                {"policies": 8, "schedule": "batched"},
                {"speedup": 2.81},
                "other base and tasks",
            ),
            "marlaas": reported(
                "MARLaaS",
                "its own report",
                "rewards_at_once",
                {"policies": 32, "schedule": "batched"},
                {"time_saved": 0.85},
                "85 % less time with 32 policies; other base and tasks",
            ),
        }
    )
    lines = {"x": "policies", "y": "speedup", "by": ("schedule",), "log": "x"}
    config.pictures = ConfigDict(
        {
            "speedup_at_once": {"grid": "rewards_at_once"} | lines,
            "speedup_waiting": {"grid": "rewards_waiting", "panels": "reward_s"} | lines,
            "crossover": {"grid": "crossover", "x": "rollouts", "y": "speedup", "log": "x"},
        }
    )
    return config
