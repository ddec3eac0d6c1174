"""Training and sampling several adapters at once, against torch, transformers and PEFT.

``ratio_train``: one step of P policies with a GRPO group each against P updates of the peer.
``ratio_train_distinct``: as many tokens in rows that share nothing. ``ratio_sample``: a greedy
batch whose rows use different adapters.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from benchmarks.bases import open_base
from benchmarks.torch_peer import PeftPeer, Work, fastest
from mint_jax import params as params_lib
from mint_jax.lora.peft import write_peft
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models.base import Base
from mint_jax.models.outline import peft_tables
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.config import LossConfig, OptimizerConfig, PolicyConfig
from mint_jax.train.trainer import Trainer

LEARNING_RATE = 1e-5


def _trainer(config: Any, base: Base, rng: np.random.Generator) -> Trainer:
    """Policies whose B is not zero, so that every product matters."""
    adapter = AdapterConfig(config.rank, 2.0 * config.rank)
    loss = LossConfig("importance_sampling")
    optimizer = OptimizerConfig(LEARNING_RATE, max_grad_norm=1.0)
    named = [
        PolicyConfig(f"p{i}", adapter, optimizer, loss, seed=i) for i in range(config.policies)
    ]

    def noisy(path: str, x: Any) -> Any:
        return x if path.endswith("/a") else rng.normal(0, 0.01, x.shape).astype(np.float32)

    trainer = Trainer(base, named)
    for name in trainer.policies:
        trainer.load_adapter(name, params_lib.map_with_path(noisy, trainer.adapter(name)))
    return trainer


class _Workload:
    """Rows of ``prompt`` tokens, which a policy's rows share, and completion tokens."""

    def __init__(
        self, config: Any, vocab: int, prompt: int, shared: bool, rng: np.random.Generator
    ):
        P, B, T = config.policies, config.rows, config.tokens
        self.prompt, self.shared = prompt, shared
        self.tokens_PBT = rng.integers(20, vocab, (P, B, T))
        if shared:
            self.tokens_PBT[:, :, :prompt] = self.tokens_PBT[:, :1, :prompt]
        self.advantages_PB = rng.normal(0, 1, (P, B)).astype(np.float32)
        self.old_logp = np.full((P, B, T - prompt), -10.0, np.float32)

    def groups(self, p: int) -> list[Group]:
        prompts, answers = np.split(self.tokens_PBT[p], [self.prompt], axis=1)
        B, count = answers.shape
        sequences = []
        for b, tokens in enumerate(answers.tolist()):
            advantages = [float(self.advantages_PB[p, b])] * count
            how = [1 / (B * count)] * count, advantages, self.old_logp[p, b].tolist()
            sequences.append(TrainSequence(tokens, *how))
        if self.shared:
            return [Group(prompts[0].tolist(), sequences)]
        return [Group(prompt, [s]) for prompt, s in zip(prompts.tolist(), sequences)]

    def torch_updates(self, count: int) -> list[tuple[Any, ...]]:
        """The peer's updates of the first ``count`` policies."""
        return [
            (f"p{p}", self.tokens_PBT[p], self.prompt, self.advantages_PB[p], self.old_logp[p])
            for p in range(count)
        ]


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    base = open_base(config)
    rng = np.random.default_rng(config.seed)
    trainer = _trainer(config, base, rng)
    workloads = {
        "train": _Workload(config, base.cfg.vocab_size, config.tokens // 2, True, rng),
        "train_distinct": _Workload(config, base.cfg.vocab_size, 1, False, rng),
    }
    report: dict[str, Any] = {"base": base.name, "weights": base.weights}
    report |= {name: config[name] for name in ("policies", "rows", "tokens", "rank")}
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        made = (base.directory, _export(trainer, base, Path(folder)), LEARNING_RATE)
        names = [f"p{i % config.policies}" for i in range(config.sample_rows)]
        shape = config.sample_rows, config.sample_prompt
        prompts = rng.integers(20, base.cfg.vocab_size, shape)
        works = {
            name: Work("updates", (workload.torch_updates(2),))
            for name, workload in workloads.items()
        }
        works["sample"] = Work("generate", (prompts, names, config.trial_tokens))
        best, report["peer_candidates_s"] = fastest(made, works, config.compile_s)
        report["peer_options"] = {name: str(options) for name, options in best.items()}
        peer = PeftPeer(*made)  # the one that was tried has moved
    # before training moves the two sides apart
    peer.use(best["sample"])
    report |= _sample(config, base, trainer, peer, names, prompts)
    for name, workload in workloads.items():
        peer.use(best[name])
        report |= _train(name, workload, config, base, trainer, peer)
    return report


def _export(trainer: Trainer, base: Base, folder: Path) -> dict[str, Path]:
    names, _ = peft_tables(base.cfg)
    for name, policy in trainer.policies.items():
        write_peft(folder / name, trainer.adapter(name), policy.adapter, names)
    return {name: folder / name for name in trainer.policies}


def _train(
    name: str, workload: _Workload, config: Any, base: Base, trainer: Trainer, peer: PeftPeer
) -> dict[str, Any]:
    groups = {policy: workload.groups(p) for p, policy in enumerate(trainer.policies)}
    losses: dict[str, list[float]] = {"ours": [], "peer": []}

    def ours() -> None:
        rows = trainer.update(groups)
        losses["ours"].append(sum(r["loss"] for r in rows.values()))
        jax.block_until_ready(trainer.state)

    def peers() -> None:
        losses["peer"].append(peer.updates(workload.torch_updates(config.policies)))

    times = timing.in_turn(name, {"ours": ours, "peer": peers}, config.n)
    gap = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses["ours"], losses["peer"]))
    return {
        f"ratio_{name}": timing.ratio(times, "peer", "ours"),
        f"{name}_seconds": timing.medians_of(times),
        f"{name}_loss_gap": float(f"{gap:.2g}"),
    }


def _sample(
    config: Any, base: Base, trainer: Trainer, peer: PeftPeer, names: list[str], prompts: np.ndarray
) -> dict[str, Any]:
    greedy = {"max_tokens": config.sample_tokens, "temperature": 0.0}
    requests = [
        Request(tuple(prompt), trainer.slots[name], **greedy)
        for prompt, name in zip(prompts.tolist(), names)
    ]
    engine = Engine(base)
    last: dict[str, np.ndarray] = {}

    def ours() -> None:
        last["ours"] = np.array([c[0].tokens for c in engine.generate(requests, trainer.stacks)])

    def peers() -> None:
        last["peer"] = peer.generate(prompts, names, config.sample_tokens)

    times = timing.in_turn("sample", {"ours": ours, "peer": peers}, config.n)
    return {
        "ratio_sample": timing.ratio(times, "peer", "ours"),
        "sample_seconds": timing.medians_of(times),
        "sample_tokens": config.sample_rows * config.sample_tokens,
        "sample_same_tokens": round(float((last["ours"] == last["peer"]).mean()), 3),
    }
