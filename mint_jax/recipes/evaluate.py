"""Rewards of adapters, and of the bare base, on the held-out examples of an environment.

Each adapter is sampled twice: alone, and in one batch with others, as a server does; the tokens of
both are scored with the adapter alone. The reward of the first is the adapter's score, which is
refused where the second does not agree (see ``agreement``). Scores of the catalog's revisions are
recorded there.

A revision is sampled as in its training, except for settings in ``config.sampling``. The base and
PEFT directories are sampled as the first revision with recorded settings, or by the defaults.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.packed import digest_of
from mint_jax.envs import scoring
from mint_jax.envs.env import Example
from mint_jax.errors import UserError
from mint_jax.harness import catalogs, report, start, workdir
from mint_jax.harness.adapters import AdapterSource
from mint_jax.harness.catalogs import JobCatalog, Named
from mint_jax.harness.start import say
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.recipes import agreement
from mint_jax.recipes.options import EvaluateSettings, GrpoSampling
from mint_jax.residency.pool import Pool, ResidentAdapters
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.score import Scorer

BASE = ""  # name of the bare base among adapters
Completions = dict[str, list[list[Completion]]]  # by adapter and example
Scores = dict[str, tuple[list[np.ndarray], list[np.ndarray]]]  # of rows alone and in one batch


def run(config: EvaluateSettings, folder: Path) -> dict[str, Any]:
    """Evaluates ``config.adapters``; returns the result.

    Raises:
        UserError: an adapter's scores alone and in one batch disagree; nothing is recorded.
    """
    workdir.save_config(config, folder)
    environment = config.env.make()
    examples = environment.held_out[: config.examples]
    base = start.open_base(config)
    with catalogs.reading(config) as catalog:
        names = [text for text in dict.fromkeys(config.adapters.values()) if text]
        source = AdapterSource(base, catalog)
        with Pool(base, source, names, config.slots, say) as pool:
            samplings = _samplings(config, names, source.revisions, catalog)
            requests = {
                text: _requests(config, base, sampling, examples)
                for text, (sampling, _) in samplings.items()
            }
            alone, among, scores = _sample(config, requests, pool, source.revisions, catalog)

        def judge() -> dict[str, list[list[float]]]:
            rewards: dict[str, list[list[float]]] = {label: [] for label in config.adapters}
            for (label, text), results in itertools.product(
                config.adapters.items(), (alone, among)
            ):
                pairs = [(c, e) for e, group in zip(examples, results[text]) for c in group]
                rewards[label].append(
                    [scoring.score(label, environment, c.text or "", e) for c, e in pairs]
                )
            return rewards

        watch = scoring.Watch(config.reward_timeout)
        rewards = multihost.agree("rewards", lambda: watch.over(judge))
        verdicts = {}
        for label, text in config.adapters.items():
            own, served = (
                agreement.Sampled([c for group in drawn[text] for c in group], scored, earned)
                for drawn, scored, earned in zip((alone, among), scores[text], rewards[label])
            )
            dtype, temperature = np.dtype(base.dtype).name, samplings[text][0].temperature
            verdicts[label] = verdict = agreement.compare(own, served, dtype, temperature)
            if not verdict.holds:
                raise UserError(
                    f"{label!r} ({text or 'the base'}): {verdict}; nothing is recorded: find which"
                    " of the two serves another adapter"
                )
        about = {
            "renderer": _digest(base.need_tokenizer().sources),
            "scorer": f"{config.env.name} {_digest([config.env.name, config.env.extra])}",
            "dataset": _digest([[e.messages, e.answer] for e in examples]),
            "seed": config.seed,
        }
        rows = []
        for label, text in config.adapters.items():
            sampling, origin = samplings[text]
            named = {"name": label, "adapter": text, "revision": pool.digests.get(text)}
            row = named | _row(verdicts[label], rewards[label][0])
            row |= {"sampling": sampling.drawing, "sampling_from": origin}
            row["samples"] = config.samples
            rows.append(row)
            if catalog is not None and text in source.revisions:
                record = functools.partial(
                    _record, catalog, source.revisions[text], verdicts[label], row, about
                )
                multihost.agree("evaluation", record)
    if multihost.is_main():
        columns = ("name", "reward", "shared", "standard_error", "rows_differ")
        cells = [[row[c] for c in columns] for row in rows]
        report.table(f"{config.env.name}, held out", columns, cells)
    return {
        "job": "evaluate",
        "env": config.env.name,
        "examples": len(examples),
        "samples": config.samples,
        "base": base.fingerprint,
        **about,
        "results": rows,
    }


def _row(verdict: agreement.Agreement, rewards: Sequence[float]) -> dict[str, Any]:
    n = len(rewards)
    error = float(np.std(rewards, ddof=1) / n**0.5) if n > 1 else 0.0
    return {
        "reward": round(verdict.isolated, 4),
        "shared": round(verdict.shared, 4),
        "standard_error": round(error, 4),
        "rows": verdict.rows,
        "rows_differ": verdict.differ,
        "rows_may_differ": verdict.allowed,
        "logprob_gap": verdict.gap,
        "shared_error": verdict.error,
        "shared_error_may_be": verdict.allowed_error,
        "worst_row_error": verdict.worst,
        "worst_row_error_may_be": verdict.allowed_worst,
    }


def _digest(value: Any) -> str:
    return digest_of(json.dumps(value, sort_keys=True, default=str).encode())


def _samplings(
    config: EvaluateSettings,
    names: Sequence[str],
    revisions: Mapping[str, Named],
    catalog: JobCatalog | None,
) -> dict[str, tuple[GrpoSampling, str]]:
    """Returns how each adapter and the base are sampled, and where that is from."""

    def recorded() -> dict[str, dict[str, Any] | None]:
        assert catalog is not None or not revisions
        return {
            text: catalog.main.revision(named.policy, named.number).sampling  # type: ignore[arg-type]
            for text, named in revisions.items()
        }

    found = multihost.agree("how revisions were sampled", recorded)
    trained = {text: values for text, values in found.items() if values is not None}
    first, given, out = next(iter(trained), None), config.sampling.given, {}
    for text in (*names, BASE):
        source = text if text in trained else first
        if source is None:
            origin = "the defaults of training"
        else:
            origin = "its training" if source == text else f"the training of {source}"
        if given:
            origin = f"the config ({', '.join(sorted(given))}), else {origin}"
        values: dict[str, Any] = {**trained[source]} if source is not None else {}
        values |= {"stop": tuple(values.get("stop", ()))} | given
        out[text] = GrpoSampling(**values), origin
    return out


def _requests(
    config: EvaluateSettings, base: Base, sampling: GrpoSampling, examples: Sequence[Example]
) -> list[Request]:
    """Returns a request for each example, for the bare base."""
    n, first, ends = config.samples, config.seed, base.need_tokenizer().eos_ids
    prompts = [tuple(start.encode(base, example.messages)) for example in examples]
    multihost.require_same("the prompts", lambda: prompts)
    return [
        Request(**sampling.drawing, prompt=p, n=n, seed=first + i * n, stop_ids=ends)
        for i, p in enumerate(prompts)
    ]


def _sample(
    config: EvaluateSettings,
    requests: Mapping[str, Sequence[Request]],
    pool: Pool,
    revisions: Mapping[str, Named],
    catalog: JobCatalog | None,
) -> tuple[Completions, Completions, Scores]:
    """Returns completions of every adapter and of the base alone, those in batches of
    ``config.slots`` adapters, and scores of both: log-probabilities under the adapter alone.

    The adapter alone is loaded again into a pool with a single slot, so that an error that puts it
    into a wrong slot of the batch does not repeat itself.
    """
    base, names = pool.base, list(pool.digests)
    groups = [names[k : k + config.slots] for k in range(0, len(names), config.slots)] or [[]]
    names.append(BASE)
    progress = Progress("evaluate", len(groups) + 2 * len(names))
    decode, cache_bytes = base.need_tokenizer().decode, start.cache_bytes(config.cache_gib)
    engine = Engine(base, decode, config.max_rows, cache_bytes=cache_bytes)
    scorer, done = Scorer(base), itertools.count(1)
    among: Completions = {}
    for group in groups:
        with pool.hold([*group, BASE]) as resident:
            among |= sample_together(engine, requests, resident, [*group, BASE], "in one batch")
        progress.update(next(done), f"{len(group) + 1} in one batch")
    alone: Completions = {}
    scores: Scores = {}
    for text in names:
        name = revisions[text].digest if text in revisions else text  # an alias may have moved
        with (
            Pool(base, AdapterSource(base, catalog), [name], 1) as own,
            own.hold([name]) as resident,
        ):
            slot = resident.slot(name)
            single = ResidentAdapters({text: slot} if slot else {}, resident.stacks)
            alone |= sample_together(engine, requests, single, [text], "alone")
            progress.update(next(done), f"{text or 'base'} alone")
            sampled = alone[text], among[text]
            scores[text] = _scores(scorer, requests[text], sampled, slot, resident.stacks)
            progress.update(next(done), f"{text or 'base'} scored")
    return alone, among, scores


def _scores(
    scorer: Scorer,
    requests: Sequence[Request],
    sampled: tuple[list[list[Completion]], list[list[Completion]]],
    slot: Slot | None,
    stacks: Stacks,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns log-probabilities of the sampled tokens; a row of both samplings is scored once."""
    alone, among = (
        [(r.prompt, tuple(c.tokens)) for r, group in zip(requests, groups) for c in group]
        for groups in sampled
    )
    distinct = list(dict.fromkeys([*alone, *among]))
    texts = [(*prompt, *tokens) for prompt, tokens in distinct]
    values = scorer.logprobs(texts, [slot] * len(texts), stacks)
    found = {row: row_values[len(row[0]) - 1 :] for row, row_values in zip(distinct, values)}
    return [found[row] for row in alone], [found[row] for row in among]


def sample_together(
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
        out[text].append(completions)
    return out


def _record(
    catalog: JobCatalog,
    revision: Named,
    verdict: agreement.Agreement,
    metrics: dict[str, Any],
    about: dict[str, Any],
) -> None:
    scores = {name: getattr(verdict, name) for name in ("isolated", "shared", "tolerance")}
    catalog.main.record_evaluation(str(revision), metrics=metrics, **scores, **about)
