"""A base whose layers have states against a dense one of the same width: a training step, and
decoding.

``train``, ``decode``: seconds per matrix FLOP of the hybrid over those of the dense base.
``flops``: of a training step as traced (``mint_jax.aot``), attention at full length included; of
conditionals the cheapest branches, for these rows have no siblings. Of a decoding step those that
its tokens need, for a traced step has room for longer rows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.bases import random_base
from benchmarks.train_wave import random_groups, step, trainer
from mint_jax.aot.flops import traced_flops
from mint_jax.aot.programs import Plan
from mint_jax.aot.settings import TrainShape
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
    [program] = (p for p in plan.training(train) if p.name == "train")
    return {
        "train": traced_flops(program.trace(base.mesh).jaxpr.jaxpr, branch=min),
        "decode": float(config.rows * _token_flops(base, config.tokens // 2)),
    }


def _token_flops(base: Base, past: int) -> int:
    """Returns the FLOPs of a token after ``past`` others: 2 for each number of a matrix, scores and
    values of every position, and three products with a state.
    """
    cfg, d = base.cfg, base.cfg.state
    looked_up = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model
    attention = 4 * cfg.num_heads * cfg.head_dim * past
    of_state = 0 if d is None else 6 * d.heads * d.key * d.value
    mixers = (L * (of_state if cfg.has_state(n) else attention) for n, L in cfg.stacks.items())
    return 2 * (base.nbytes // 4 - looked_up) + sum(mixers)


def _train(config: Any, base: Base) -> Callable[[], None]:
    return step(trainer(config, base, 1), {"p0": random_groups(config, base, config.rows)})


def _decode(config: Any, base: Base) -> Callable[[], Any]:
    rng = np.random.default_rng(config.seed)
    engine = Engine(base, max_rows=config.rows, rows=(config.rows,))
    prompts = rng.integers(3, base.cfg.vocab_size, (config.rows, 2)).tolist()
    requests = [
        Request(tuple(prompt), max_tokens=config.tokens, temperature=0.0) for prompt in prompts
    ]
    return lambda: engine.generate(requests)
