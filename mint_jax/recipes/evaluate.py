"""Rewards of adapters, and of the bare base, on the held-out examples of an environment.

Each adapter is sampled twice with the same seeds: alone, and in one batch with others, as a server
does. The reward of the first is its score, which is recorded in the catalog unless the second was
not drawn from the same adapter (see ``compare``). A revision is sampled as in its training, except
for ``config.sampling``; the base and PEFT directories as the first revision with recorded settings.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.packed import digest_of
from mint_jax.envs import scoring
from mint_jax.errors import UserError
from mint_jax.harness import report, start, workdir
from mint_jax.harness.adapters import AdapterSource, JobCatalog, Named, catalog_of
from mint_jax.metrics import Progress
from mint_jax.recipes.options import EvaluateSettings, GrpoSampling
from mint_jax.residency.pool import Pool, ResidentAdapters
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.score import Scorer

BASE = ""  # name of the bare base among adapters
Completions = dict[str, list[Completion]]  # by adapter; all samples of all examples
# least rounding of a log-probability: 2**-17 and 2**-8
LEAST = {"float32": 1e-5, "bfloat16": 4e-3}
# a mean over hundreds of tokens varies little, a largest row is one draw from a tail
WHOLE, WORST = 2.0, 4.0
SPREAD = 5.0  # 2 exp(-SPREAD ** 2 / 2) = 7e-6


def run(config: EvaluateSettings, folder: Path) -> dict[str, Any]:
    """Evaluates ``config.adapters``; returns the result. Raises ``UserError`` if an adapter's
    scores alone and in one batch disagree; nothing is recorded then.
    """
    workdir.save_config(config, folder)
    environment = config.env.make()
    examples = environment.held_out[: config.examples]
    base = start.open_base(config)
    prompts = [tuple(start.encode(base, example.messages)) for example in examples]
    multihost.require_same("the prompts", lambda: prompts)
    n, ends = config.samples, base.need_tokenizer().eos_ids
    about = {
        "renderer": _digest(base.need_tokenizer().sources),
        "scorer": f"{config.env.name} {_digest([config.env.name, config.env.extra])}",
        "dataset": _digest([[e.messages, e.answer] for e in examples]),
        "seed": config.seed,
    }
    with catalog_of(config) as catalog:
        names = [text for text in dict.fromkeys(config.adapters.values()) if text]
        source = AdapterSource(base, catalog)
        with Pool(base, source, names, config.slots, start.say) as pool:
            samplings = _samplings(config, names, source.revisions, catalog)
            requests = {
                text: [
                    Request(p, n=n, seed=config.seed + i * n, stop_ids=ends, **drawing)
                    for i, p in enumerate(prompts)
                ]
                for text, drawing in samplings.items()
            }
            drawn = _sample(config, requests, pool, source.revisions, catalog)

        def judge() -> dict[str, list[list[float]]]:
            paired = [example for example in examples for _ in range(n)]
            return {
                label: [
                    [
                        scoring.score(label, environment, c.text or "", e)
                        for c, e in zip(completions, paired, strict=True)
                    ]
                    for completions, _ in drawn[text]
                ]
                for label, text in config.adapters.items()
            }

        watch = scoring.Watch(config.reward_timeout)
        rewards = multihost.agree("rewards", lambda: watch.over(judge))
        found = {}
        for label, text in config.adapters.items():
            (_, alone), (_, shared) = drawn[text]
            scores = rewards[label][0], rewards[label][1]
            found[label] = compare(alone, shared, *scores, np.dtype(base.dtype).name)
            if not found[label].holds:
                raise UserError(
                    f"{label!r} ({text or 'the base'}): {found[label]}; nothing is recorded: find"
                    " which of the two serves another adapter"
                )
        rows = []
        for label, text in config.adapters.items():
            row = {"name": label, "adapter": text, "revision": pool.digests.get(text)}
            row |= found[label].row(rewards[label][0])
            rows.append(row | {"sampling": samplings[text], "samples": n})
            if catalog is not None and text in source.revisions:
                _record(catalog, str(source.revisions[text]), found[label], about, rows[-1])
    if multihost.is_main():
        columns = ("name", "reward", "shared", "standard_error")
        cells = [[row[c] for c in columns] for row in rows]
        report.table(f"{config.env.name}, held out", columns, cells)
    result = {"job": "evaluate", "env": config.env.name, "examples": len(examples), "samples": n}
    return result | {"base": base.fingerprint, **about, "results": rows}


def _digest(value: Any) -> str:
    return digest_of(json.dumps(value, sort_keys=True, default=str).encode())


def _record(
    catalog: JobCatalog, name: str, found: "Agreement", about: dict[str, Any], row: dict[str, Any]
) -> None:
    scores = {k: getattr(found, k) for k in ("isolated", "shared", "tolerance")} | about

    def write() -> None:
        catalog.main.record_evaluation(name, metrics=row, **scores)

    multihost.agree("evaluation", write)


def _samplings(
    config: EvaluateSettings,
    names: Sequence[str],
    revisions: Mapping[str, Named],
    catalog: JobCatalog | None,
) -> dict[str, dict[str, Any]]:
    """Returns how each adapter and the base are sampled."""

    def recorded() -> dict[str, dict[str, Any] | None]:
        if catalog is None:
            return {}
        return {
            text: catalog.main.revision(named.policy, named.number).sampling
            for text, named in revisions.items()
        }

    found = multihost.agree("how revisions were sampled", recorded)
    trained = {text: values for text, values in found.items() if values is not None}
    first, out = next(iter(trained.values()), {}), {}
    for text in (*names, BASE):
        values = GrpoSampling().drawing | trained.get(text, first) | config.sampling.given
        out[text] = values | {"stop": tuple(values["stop"])}
    return out


def _sample(
    config: EvaluateSettings,
    requests: Mapping[str, Sequence[Request]],
    pool: Pool,
    revisions: Mapping[str, Named],
    catalog: JobCatalog | None,
) -> dict[str, list[tuple[list[Completion], list[np.ndarray]]]]:
    """Returns every adapter's completions, alone and in batches of ``config.slots`` adapters, with
    the errors of their log-probabilities: one array a row, sampled minus scored alone.
    """
    base, names = pool.base, list(pool.digests)
    groups = [names[k : k + config.slots] for k in range(0, len(names), config.slots)] or [[]]
    names.append(BASE)
    progress, done = Progress("evaluate", len(groups) + len(names)), itertools.count(1)
    decode, cache_bytes = base.need_tokenizer().decode, int(config.cache_gib * 2**30) or None
    engine = Engine(base, decode, config.max_rows, cache_bytes=cache_bytes)
    scorer = Scorer(base)
    shared: Completions = {}
    for group in groups:
        with pool.hold([*group, BASE]) as resident:
            shared |= _sample_together(engine, requests, resident, [*group, BASE], "in one batch")
        progress.update(next(done), f"{len(group) + 1} in one batch")
    out = {}
    for text in names:
        name = revisions[text].digest if text in revisions else text  # an alias may have moved
        # Loaded again into a pool with a single slot: an error that puts the adapter into a wrong
        # slot of the batch must not repeat itself.
        own = Pool(base, AdapterSource(base, catalog), [name], 1)
        with own, own.hold([name]) as resident:
            slot = resident.slot(name)
            single = ResidentAdapters({text: slot} if slot else {}, resident.stacks)
            alone = _sample_together(engine, requests, single, [text], "alone")[text]
            prompts = [r.prompt for r in requests[text] for _ in range(r.n)]
            rows = [
                (prompt, tuple(c.tokens))
                for drawn in (alone, shared[text])
                for prompt, c in zip(prompts, drawn, strict=True)
            ]
            distinct = list(dict.fromkeys(rows))  # a row of both samplings is scored once
            texts = [(*prompt, *tokens) for prompt, tokens in distinct]
            values = scorer.logprobs(texts, [slot] * len(texts), resident.stacks)
        scores = {row: scored[len(row[0]) - 1 :] for row, scored in zip(distinct, values)}
        errors = [
            np.subtract(c.logprobs, scores[row]) for c, row in zip([*alone, *shared[text]], rows)
        ]
        out[text] = [(alone, errors[: len(alone)]), (shared[text], errors[len(alone) :])]
        progress.update(next(done), f"{text or 'base'} alone")
    return out


def _sample_together(
    engine: Engine,
    requests: Mapping[str, Sequence[Request]],
    resident: ResidentAdapters,
    names: Sequence[str],
    tenant: str,
) -> Completions:
    """Returns completions of several adapters' requests from one batch.

    Requests of an example are neighbours, so that rows of all adapters run together. Each call has
    a tenant of its own: it reads all prompts itself, and takes none from the cache.
    """
    order = [(text, i) for i in range(len(requests[names[0]])) for text in names]
    mixed = [
        dataclasses.replace(requests[text][i], adapter=resident.slot(text), tenant=tenant)
        for text, i in order
    ]
    out: Completions = {text: [] for text in names}
    for (text, _), completions in zip(order, engine.generate(mixed, resident.stacks)):
        out[text] += completions
    return out


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Comparison of two samplings of the same rows.

    Attributes:
        error, worst: root mean square of the batch's log-probabilities minus the adapter's own,
            nats, over all tokens and of the worst row.
        isolated, shared: mean rewards alone and in the batch, which may differ by ``tolerance``.
    """

    error: float
    allowed_error: float
    worst: float
    allowed_worst: float
    isolated: float
    shared: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """True where the score may be recorded."""
        near = self.error <= self.allowed_error and self.worst <= self.allowed_worst
        return near and abs(self.isolated - self.shared) <= self.tolerance

    def row(self, rewards: Sequence[float]) -> dict[str, Any]:
        """Returns the figures of a result."""
        n = len(rewards)
        error = float(np.std(rewards, ddof=1) / n**0.5) if n > 1 else 0.0
        return {
            "reward": round(self.isolated, 4),
            "shared": round(self.shared, 4),
            "standard_error": round(error, 4),
            "rows": n,
            "shared_error": self.error,
            "shared_error_may_be": self.allowed_error,
            "worst_row_error": self.worst,
            "worst_row_error_may_be": self.allowed_worst,
        }

    def __str__(self) -> str:
        return (
            f"score {self.isolated:.4f} loaded alone and {self.shared:.4f} in a shared batch, whose"
            f" log-probabilities are off by {self.error:.2g} nats ({self.allowed_error:.2g} may be"
            f" rounding), those of its worst row by {self.worst:.2g} ({self.allowed_worst:.2g} may)"
        )


def compare(
    alone: Sequence[np.ndarray],
    shared: Sequence[np.ndarray],
    isolated_rewards: Sequence[float],
    shared_rewards: Sequence[float],
    dtype: str,
) -> Agreement:
    """Compares the same rows sampled alone and in a batch with others, by the sampled
    log-probabilities minus the adapter's own, one array a row.

    The batch's may differ by rounding, which is measured on the rows drawn alone: by ``WHOLE``
    times as much over all tokens, and by ``WORST`` times in the worst row. Another adapter differs
    by tenths of a nat. A row's two rewards have the same distribution, so by Hoeffding's bound the
    sum of their differences exceeds ``SPREAD`` times the root of the sum of their squares in fewer
    than 1 in 100,000 comparisons.
    """
    (noise, noisiest), (error, worst) = map(_sizes, (alone, shared))
    difference = np.subtract(isolated_rewards, shared_rewards)
    bound = SPREAD * float(np.sqrt(np.sum(difference**2))) / len(difference) + 1e-9
    return Agreement(
        error=error,
        allowed_error=WHOLE * max(noise, LEAST[dtype]),
        worst=worst,
        allowed_worst=WORST * max(noisiest, LEAST[dtype]),
        isolated=float(np.mean(isolated_rewards)),
        shared=float(np.mean(shared_rewards)),
        tolerance=bound,
    )


def _sizes(errors: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns the root mean square over all tokens, and that of the worst row; NaN for NaN."""
    worst = np.max([np.mean(np.square(row)) for row in errors])
    return math.sqrt(np.mean(np.square(np.concatenate(errors)))), math.sqrt(worst)
