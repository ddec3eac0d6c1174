"""Rewards of adapters, and of the bare base, on the held-out examples of an environment.

Each adapter is sampled twice: alone, and in one batch with others, as it would be served: with all, or as many as ``config.slots``
of them. The first is its score; where the second is not the same (see ``agreement``) there is no score. Scores of the catalog's
revisions are recorded there.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.packed import digest_of
from mint_jax.envs import env as env_lib
from mint_jax.envs import scoring
from mint_jax.envs.env import Example
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, agreement, catalogs, common, report
from mint_jax.jobs.adapters import Loaded
from mint_jax.jobs.catalogs import JobCatalog
from mint_jax.jobs.common import Config
from mint_jax.jobs.grpo import Sampling, checked_reward
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.rollout.engine import Completion, DenseEngine, Request

BASE = ""  # the adapter's name where the bare base is meant


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Evaluates ``config.adapters`` (label -> revision or PEFT directory, or "" for the base); returns the result it prints.

    Raises:
        UserError: an adapter's score in the shared batch is not its own; nothing is recorded then.
    """
    common.save_config(config, workdir)
    options = dict(config.env)
    name = options.pop("name")
    environment = env_lib.make(name, **options)
    examples = environment.held_out[: config.examples]
    sampling = common.build(Sampling, config.sampling, "sampling")
    base = common.open_base(config)
    with catalogs.reading(config) as catalog:
        loaded = adapters.read_all(config.adapters.values(), base, catalog)
        requests = _requests(config, base, sampling, examples)
        alone, among = _sample(config, base, requests, loaded)

        def judge() -> dict[str, tuple[list[float], list[float]]]:
            def rewards(label: str, results: Sequence[list[Completion]]) -> list[float]:
                return [checked_reward(label, environment, c, e) for e, group in zip(examples, results) for c in group]

            return {label: (rewards(label, alone[text]), rewards(label, among[text])) for label, text in config.adapters.items()}

        watch = scoring.Watch(config.get("reward_timeout", scoring.TIMEOUT_S))
        judged = multihost.agree("rewards", lambda: watch.over(judge))
        verdicts = {}
        for label, text in config.adapters.items():
            own, served = ([c for group in found[text] for c in group] for found in (alone, among))
            verdict = agreement.compare(own, served, judged[label], np.dtype(base.dtype).name, sampling.temperature)
            if not verdict.holds:
                who = f"{label!r} ({text or 'the base'})"
                raise UserError(f"{who}: {verdict}; nothing is recorded: find which of the two serves another adapter")
            verdicts[label] = verdict
        about = {
            "renderer": _digest(base.need_tokenizer().sources),
            "scorer": f"{name} {_digest([name, options])}",
            "dataset": _digest([[e.messages, e.answer] for e in examples]),
            "seed": int(config.get("seed", 0)),
        }
        rows = []
        for label, text in config.adapters.items():
            verdict, values = verdicts[label], judged[label][0]
            error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
            row = {"name": label, "adapter": text, "revision": loaded[text].digest if text else None}
            row |= {"reward": round(verdict.isolated, 4), "shared": round(verdict.shared, 4), "standard_error": round(error, 4)}
            row |= {"rows": verdict.rows, "rows_differ": verdict.differ, "rows_may_differ": verdict.allowed, "logprob_gap": verdict.gap}
            rows.append(row)
            if text and catalog is not None and loaded[text].revision is not None:
                _record(catalog, loaded[text], verdict, row | {"samples": config.samples, "sampling": dict(config.sampling)}, about)
    if multihost.is_main():
        columns = ("name", "reward", "shared", "standard_error", "rows_differ")
        report.table(f"{name}, held out", columns, [[r[c] for c in columns] for r in rows])
    shown = {"job": "evaluate", "env": name, "examples": len(examples), "samples": config.samples, "base": base.fingerprint}
    return shown | about | {"results": rows}


def _digest(value: Any) -> str:
    return digest_of(json.dumps(value, sort_keys=True, default=str).encode())


def _requests(config: Config, base: Base, sampling: Sampling, examples: Sequence[Example]) -> list[Request]:
    """One for every example, for the bare base."""
    n, first, ends = config.samples, int(config.get("seed", 0)), base.need_tokenizer().eos_ids
    prompts = [tuple(common.encode(base, example.messages)) for example in examples]
    multihost.require_same("the prompts", lambda: prompts)
    return [sampling.request(prompt=p, n=n, seed=first + i * n, stop_ids=ends) for i, p in enumerate(prompts)]


def _sample(
    config: Config, base: Base, requests: Sequence[Request], loaded: Mapping[str, Loaded]
) -> tuple[dict[str, list[list[Completion]]], dict[str, list[list[Completion]]]]:
    """Completions of every adapter, and of the base: each alone, and as many as there are slots for in one batch."""
    names, room = [text for text in dict.fromkeys(config.adapters.values()) if text], config.get("slots", 64)
    if not isinstance(room, int) or room < 1:
        raise UserError(f"slots is {room!r}; expected how many adapters may be on the device at once, at least 1")
    parties = [[*names[k : k + room], BASE] for k in range(0, max(1, len(names)), room)]  # with the base a lone adapter has company, too
    names.append(BASE)
    progress = Progress("evaluate", len(names) + len(parties))
    engine = DenseEngine(base, base.need_tokenizer().decode, config.get("max_rows", 64))
    alone = {}
    for k, text in enumerate(names):
        alone[text] = sample_together(engine, base, requests, {text: loaded[text]} if text else {}, [text])[text]
        progress.update(k + 1, f"{text or 'base'} alone")
    among: dict[str, list[list[Completion]]] = {}
    for k, party in enumerate(parties):
        among |= sample_together(engine, base, requests, {text: loaded[text] for text in party if text}, party)
        progress.update(len(names) + k + 1, f"{len(party)} in one batch")
    return alone, among


def sample_together(
    engine: DenseEngine, base: Base, requests: Sequence[Request], loaded: Mapping[str, Loaded], names: Sequence[str]
) -> dict[str, list[list[Completion]]]:
    """Completions of the same requests under each of several adapters, in one batch.

    The requests of one example stand side by side, so that every group of rows that runs together is mixed.
    """
    stacks, slots = adapters.make_resident(loaded, base)
    asked = [(text, request) for request in requests for text in names]
    mixed = [dataclasses.replace(request, adapter=slots.get(text)) for text, request in asked]
    out: dict[str, list[list[Completion]]] = {text: [] for text in names}
    for (text, _), completions in zip(asked, engine.generate(mixed, stacks)):
        out[text].append(completions)
    return out


def _record(catalog: JobCatalog, loaded: Loaded, verdict: agreement.Agreement, metrics: dict[str, Any], about: dict[str, Any]) -> None:
    def record() -> None:
        scores = {"isolated": verdict.isolated, "shared": verdict.shared, "tolerance": verdict.tolerance}
        catalog.main.record_evaluation(str(loaded.revision), metrics=metrics, **scores, **about)

    multihost.agree("evaluation", record)
