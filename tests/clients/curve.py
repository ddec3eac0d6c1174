"""Reward of the cookbook's arithmetic recipe, step by step, as run.py left it in its workdir -> a
JSON and a PNG file in a folder.

Command: python tests/clients/curve.py runs/clients notebooks/reports/cpu-2-cores/clients
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

from mint_jax import stamp

NAMES = {
    "reward": "env/all/reward/total",
    "right": "env/all/correct",
    "ended": "env/all/format",
    "wall_s": "time/total",
}


def report(workdir: Path) -> dict[str, Any]:
    """Per step: mean reward, share of right sums, share of ended answers, seconds; and what gave
    them.
    """
    folder = next(workdir.glob("*/logs/arithmetic"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if NAMES["reward"] in row]  # the last one is of the whole run
    recipe = json.loads((folder / "config.json").read_text())
    kept = (
        "learning_rate",
        "lora_rank",
        "loss_fn",
        "max_tokens",
        "max_steps",
        "temperature",
        "dataset_builder",
    )
    server = json.loads((folder.parents[1] / "server" / "config.json").read_text())
    steps = {name: [row[theirs] for row in rows] for name, theirs in NAMES.items()}
    return {
        "recipe": "tinker_cookbook.recipes.math_rl.train env=arithmetic",
        "options": {name: recipe[name] for name in kept},
        "reward_first": steps["reward"][0],
        "reward_last_4": statistics.mean(steps["reward"][-4:]),
        "n": len(rows),
        "wall_s": sum(steps["wall_s"]),
        "seed": "the recipe draws its problems by the step's number; samples have no seed",
        "steps": steps,
        "stamp": stamp.stamp(server),
    }


def draw(told: dict[str, Any], path: Path) -> None:
    """The reward, and the shares that make it, over steps."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for name, label in (
        ("reward", "mean reward"),
        ("ended", "share of answers that end"),
        ("right", "share of right sums"),
    ):
        axes.plot(told["steps"][name], label=label, marker=".")
    axes.set_xlabel("training step")
    axes.set_title("Cookbook's arithmetic RL on SmolLM2-135M-Instruct", fontsize=9)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--note", default="", help="what else there is to say of the run")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    told = report(asked.workdir) | {"note": asked.note}
    (asked.out / "arithmetic_rl.json").write_text(json.dumps(told, indent=1) + "\n")
    draw(told, asked.out / "arithmetic_rl.png")


if __name__ == "__main__":
    main()
