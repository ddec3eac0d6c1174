"""A base whose layers have states against a dense one of the same width: a training step, and
decoding.

``train``, ``decode``: seconds per matrix FLOP of the hybrid over those of the dense base.
``flops``: of a step of each, as traced (``mint_jax.aot``), attention at full length included.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.bases import random_base
from benchmarks.train_wave import group, step, trainer
from mint_jax.aot.flops import traced_flops
from mint_jax.aot.programs import Plan
from mint_jax.aot.settings import RolloutShape, TrainShape
from mint_jax.models.base import Base
from mint_jax.models.hf_config import from_hf
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    bases = {
        name: random_base(from_hf({**config.common, **config[name]}), jnp.float32)
        for name in ("dense", "hybrid")
    }
    report: dict[str, Any] = {
        "shape": config.common.to_dict(),
        **{name: config[name] for name in ("rank", "rows", "tokens", "n")},
        "parameters": {name: base.nbytes // 4 for name, base in bases.items()},
        "flops": {name: _flops(config, base) for name, base in bases.items()},
    }
    for work, side in {"train": _train, "decode": _decode}.items():
        sides = {name: side(config, base) for name, base in bases.items()}
        seconds = timing.in_turn(work, sides, config.n)
        each = {
            name: [s / report["flops"][name][work] for s in times]
            for name, times in seconds.items()
        }
        report[work] = timing.ratio(each, "hybrid", "dense")
        report[f"{work}_seconds"] = timing.medians_of(seconds)
    return report


def _flops(config: Any, base: Base) -> dict[str, float]:
    plan = Plan(base.cfg, base.mesh, base.dtype, trainer(config, base, 1).policies["p0"].adapter)
    train = TrainShape(1, config.rows, config.tokens + 1, config.tokens)
    rollout = RolloutShape(1, config.rows, 1, 2, config.tokens)
    programs = {p.name: p for p in (*plan.training(train), *plan.sampling(rollout))}
    return {
        name: traced_flops(programs[name].trace(base.mesh).jaxpr.jaxpr)
        for name in ("train", "decode")
    }


def _train(config: Any, base: Base) -> Callable[[], None]:
    rng, one = np.random.default_rng(config.seed), trainer(config, base, 1)
    return step(one, {"p0": [group(config, base, rng) for _ in range(config.rows)]})


def _decode(config: Any, base: Base) -> Callable[[], Any]:
    rng = np.random.default_rng(config.seed)
    engine = Engine(base, max_rows=config.rows, rows=(config.rows,))
    prompts = rng.integers(3, base.cfg.vocab_size, (config.rows, 2)).tolist()
    requests = [
        Request(tuple(prompt), max_tokens=config.tokens, temperature=0.0) for prompt in prompts
    ]
    return lambda: engine.generate(requests)
