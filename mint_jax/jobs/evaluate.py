"""Rewards of adapters, and of the bare base, on the held-out examples of an environment."""

from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import multihost
from mint_jax.envs import env as env_lib
from mint_jax.jobs import adapters, common, report
from mint_jax.jobs.common import Config
from mint_jax.jobs.grpo import Sampling, checked_reward
from mint_jax.metrics import Progress
from mint_jax.rollout.engine import DenseEngine


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Evaluates ``config.adapters`` (name -> path, or "" for the base); returns the result it prints."""
    common.save_config(config, workdir)
    options = dict(config.env)
    name = options.pop("name")
    environment = env_lib.make(name, **options)
    examples = environment.held_out[: config.examples]
    sampling = common.build(Sampling, config.sampling, "sampling")
    base = common.open_base(config)
    tokenizer = base.need_tokenizer()
    stacks, slots = adapters.make_resident(config.adapters.values(), base)
    requests, owners = [], []
    for label, path in config.adapters.items():
        for i, example in enumerate(examples):
            prompt = tuple(common.encode(base, example.messages))
            adapter = slots[path] if path else None
            requests.append(
                sampling.request(prompt=prompt, adapter=adapter, n=config.samples, seed=i * config.samples, stop_ids=tokenizer.eos_ids)
            )
            owners.append((label, example))
    multihost.require_same("the prompts", lambda: [r.prompt for r in requests])
    progress = Progress("evaluate", len(requests))
    engine = DenseEngine(base, tokenizer.decode, config.get("max_rows", 64))
    results = engine.generate(requests, stacks, lambda done, _: progress.update(done, "prompts"))

    def judge() -> dict[str, list[float]]:
        rewards: dict[str, list[float]] = {label: [] for label in config.adapters}
        for (label, example), completions in zip(owners, results):
            rewards[label] += [checked_reward(label, environment, c, example) for c in completions]
        return rewards

    rows = []
    for label, values in multihost.agree("rewards", judge).items():
        error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
        mean = round(float(np.mean(values)), 4)
        rows.append({"name": label, "adapter": config.adapters[label], "reward": mean, "standard_error": round(error, 4)})
    if multihost.is_main():
        columns = ("name", "reward", "standard_error")
        report.table(f"{name}, held out", columns, [[r[c] for c in columns] for r in rows])
    return {"job": "evaluate", "env": name, "examples": len(examples), "samples": config.samples, "base": base.fingerprint, "results": rows}
