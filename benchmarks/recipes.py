"""Wall time of three ways of a student to one held-out reward: GRPO, distillation from its own
rollouts (on-policy), and from the stored rollouts of a teacher's last steps.

``seconds``: from the start of a job to the update behind its first revision of reward
``config.target``, if all ``n`` seeds reach it; without compilation and the teacher's ``teacher_s``.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.sweeps import pictures
from benchmarks.sweeps.grid import Picture
from mint_jax import recipes
from mint_jax.harness import report as report_lib

WAYS = ("grpo", "on_policy", "stored")


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    with tempfile.TemporaryDirectory() as place:
        *_, teacher_s = _train(config, "teacher", "grpo", 0, config.steps, Path(place))
        updates = {}  # (way, seed, revision) -> seconds from the start of its job
        for seed in range(config.n + 1):  # the first compiles
            for way in WAYS:
                steps = config.steps if seed else config.every
                seconds = _train(config, f"{way}_{seed}", way, seed, steps, Path(place))
                ends = enumerate(seconds[config.every - 1 :: config.every], 1)
                updates |= {(way, seed, k): s for k, s in ends if seed}
        labels = {f"{way}_{seed}@{k}": (way, seed, k) for way, seed, k in updates}
        own = {name: config[name] for name in ("base", "dtype", "examples", "samples", "slots")}
        own |= {"job": "evaluate", "catalog": f"{place}/catalog", "env": config.env.to_dict()}
        own["adapters"] = {name: name for name in ("teacher@latest", *labels)}
        results = recipes.run(recipes.read(own), Path(place) / "evaluate")["results"]
    rewards = {row["name"]: row["reward"] for row in results}
    rows = [
        {"way": at[0], "seed": at[1], "seconds": updates[at], "reward": rewards[label]}
        for label, at in labels.items()
    ]
    found: dict[str, Any] = {"target": config.target, "teacher_s": teacher_s, "rows": rows}
    found["teacher_reward"] = rewards["teacher@latest"]
    for way in WAYS:
        good = [r for r in rows if r["way"] == way and r["reward"] >= config.target]
        first = {r["seed"]: r["seconds"] for r in reversed(good)}
        found[way] = {"reached": len(first)}
        if len(first) == config.n:
            found[way]["seconds"] = timing.median(first.values())
    cells = [[w, found[w]["reached"], found[w].get("seconds", {}).get("median", "")] for w in WAYS]
    report_lib.table(f"reward {config.target}", ("way", "seeds", "seconds"), cells)
    shown = [{"settings": row, "figures": row} for row in rows]
    target = {"grid": "", "who": "target", "settings": {}, "figures": {"reward": config.target}}
    drawn = {"points": [{"grid": "", "rows": shown}], "references": [target]}
    picture = Picture(grid="", x="seconds", y="reward", by=("way", "seed"))
    pictures.draw({"recipes": picture}, drawn, workdir)
    return found


def _train(config: Any, name: str, way: str, seed: int, steps: int, place: Path) -> list[float]:
    """Trains a policy; returns the seconds from the start to each of its updates."""
    rank = config.teacher_rank if name == "teacher" else config.student_rank
    policy: dict[str, Any] = {"adapter": {"rank": rank, "alpha": config.alpha}}
    policy["optimizer"] = config.optimizer.to_dict()
    job: dict[str, Any] = {"job": "grpo", "eval": {"examples": 1, "samples": 1}}
    if way == "stored":
        job = {"job": "sft"}
        data = {"rollouts": ("teacher",), "min_reward": config.min_reward, "held_out": 1}
        policy |= {"data": data, "batch_size": config.batch_size}
    else:
        sampling, loss = config.sampling.to_dict(), {"kind": "ppo"}
        if way == "on_policy":
            sampling["reward_weight"] = 0.0
            loss |= {"kl_kind": "k1", "kl": 1.0, "reference": "teacher@latest"}
        policy |= {"env": config.env.to_dict(), "sampling": sampling, "loss": loss}
    job |= {"base": config.base, "dtype": config.dtype, "seed": seed, "steps": steps}
    job |= {"catalog": str(place / "catalog"), "export_every": config.every, "tensorboard": False}
    began = time.time()
    recipes.run(recipes.read(job | {"policies": {name: policy}}), place / name)
    rows = map(json.loads, (place / name / "metrics.jsonl").read_text().splitlines())
    return [round(row["time"] - began, 1) for row in rows]
