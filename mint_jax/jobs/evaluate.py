"""Rewards of adapters, and of the bare base, on the held-out examples of an environment.

Each adapter is sampled twice: alone, and in one batch with others, as it would be served: with all,
or as many as ``config.slots`` of them; what both drew is scored once more with the adapter alone.
The first is its score; where the second is not the same (see ``agreement``) there is no score.
Scores of the catalog's revisions are recorded there.

A revision is sampled as it was trained, as far as ``config.sampling`` does not say otherwise: by
the settings that its record in the catalog says. What has none (the base, a PEFT directory) is
sampled as the first revision that has some, or by the defaults of training.
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
from mint_jax.jobs import agreement, catalogs, common, report, settings
from mint_jax.jobs.adapters import AdapterSource
from mint_jax.jobs.catalogs import JobCatalog, Named
from mint_jax.jobs.common import Config
from mint_jax.jobs.grpo import checked_reward
from mint_jax.jobs.options import GrpoSampling
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.residency.pool import Pool, ResidentAdapters
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.score import Scorer

BASE = ""  # the adapter's name where the bare base is meant


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Evaluates ``config.adapters`` (label -> revision or PEFT directory, or "" for the base);
    returns the result it prints.

    Raises:
        UserError: an adapter's score in the shared batch is not its own; nothing is recorded then.
    """
    settings.complete(config)  # a caller other than launch may leave settings out
    common.save_config(config, workdir)
    options = dict(config.env)
    name = options.pop("name")
    environment = env_lib.make(name, **options)
    examples = environment.held_out[: config.examples]
    common.build(GrpoSampling, _given(config), "sampling")
    base = common.open_base(config)
    with catalogs.reading(config) as catalog:
        names = [text for text in dict.fromkeys(config.adapters.values()) if text]
        source = AdapterSource(base, catalog)
        with Pool(base, source, names, config.slots, common.say) as pool:
            samplings = _samplings(config, names, source.revisions, catalog)
            requests = {
                text: _requests(config, base, sampling, examples)
                for text, (sampling, _) in samplings.items()
            }
            alone, among, scores = _sample(config, requests, pool, source.revisions, catalog)

        def judge() -> dict[str, tuple[list[float], list[float]]]:
            def rewards(label: str, results: Sequence[list[Completion]]) -> list[float]:
                return [
                    checked_reward(label, environment, c, e)
                    for e, group in zip(examples, results)
                    for c in group
                ]

            return {
                label: (rewards(label, alone[text]), rewards(label, among[text]))
                for label, text in config.adapters.items()
            }

        watch = scoring.Watch(config.reward_timeout)
        judged = multihost.agree("rewards", lambda: watch.over(judge))
        verdicts = {}
        for label, text in config.adapters.items():
            own, served = (
                agreement.Sampled([c for group in found[text] for c in group], scored, rewards)
                for found, scored, rewards in zip(
                    (alone, among), scores[text], judged[label], strict=True
                )
            )
            verdict = agreement.compare(
                own, served, np.dtype(base.dtype).name, samplings[text][0].temperature
            )
            if not verdict.holds:
                who = f"{label!r} ({text or 'the base'})"
                raise UserError(
                    f"{who}: {verdict}; nothing is recorded: find which of the two serves another"
                    " adapter"
                )
            verdicts[label] = verdict
        about = {
            "renderer": _digest(base.need_tokenizer().sources),
            "scorer": f"{name} {_digest([name, options])}",
            "dataset": _digest([[e.messages, e.answer] for e in examples]),
            "seed": config.seed,
        }
        rows = []
        for label, text in config.adapters.items():
            verdict, values = verdicts[label], judged[label][0]
            error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
            row = {"name": label, "adapter": text, "revision": pool.digests.get(text)}
            row |= {
                "reward": round(verdict.isolated, 4),
                "shared": round(verdict.shared, 4),
                "standard_error": round(error, 4),
            }
            row |= {
                "rows": verdict.rows,
                "rows_differ": verdict.differ,
                "rows_may_differ": verdict.allowed,
                "logprob_gap": verdict.gap,
            }
            row |= {"shared_error": verdict.error, "shared_error_may_be": verdict.allowed_error}
            row |= {
                "worst_row_error": verdict.worst,
                "worst_row_error_may_be": verdict.allowed_worst,
            }
            row |= {"sampling": samplings[text][0].drawing, "sampling_from": samplings[text][1]}
            rows.append(row)
            if catalog is not None and text in source.revisions:
                _record(
                    catalog,
                    source.revisions[text],
                    verdict,
                    row | {"samples": config.samples},
                    about,
                )
    if multihost.is_main():
        columns = ("name", "reward", "shared", "standard_error", "rows_differ")
        report.table(f"{name}, held out", columns, [[r[c] for c in columns] for r in rows])
    shown = {
        "job": "evaluate",
        "env": name,
        "examples": len(examples),
        "samples": config.samples,
        "base": base.fingerprint,
    }
    return shown | about | {"results": rows}


def _digest(value: Any) -> str:
    return digest_of(json.dumps(value, sort_keys=True, default=str).encode())


def _given(config: Config) -> dict[str, Any]:
    """The settings of ``config.sampling`` that are set."""
    return dict(config.get("sampling", {}))


def _samplings(
    config: Config, names: Sequence[str], revisions: Mapping[str, Named], catalog: JobCatalog | None
) -> dict[str, tuple[GrpoSampling, str]]:
    """How each adapter and the base are sampled, and where that is from."""

    def recorded() -> dict[str, dict[str, Any] | None]:
        assert catalog is not None or not revisions
        return {
            text: catalog.main.revision(named.policy, named.number).sampling  # type: ignore[arg-type]
            for text, named in revisions.items()
        }

    trained = {
        text: values
        for text, values in multihost.agree("how revisions were sampled", recorded).items()
        if values is not None
    }
    first, given = next(iter(trained), None), _given(config)
    out = {}
    for text in (*names, BASE):
        source = text if text in trained else first
        if source is None:
            where = "the defaults of training"
        else:
            where = "its training" if source == text else f"the training of {source}"
        if given:
            where = f"the config ({', '.join(sorted(given))}), else {where}"
        out[text] = (
            common.build(
                GrpoSampling, (trained[source] if source is not None else {}) | given, "sampling"
            ),
            where,
        )
    return out


def _requests(
    config: Config, base: Base, sampling: GrpoSampling, examples: Sequence[Example]
) -> list[Request]:
    """One for every example, for the bare base."""
    n, first, ends = config.samples, config.seed, base.need_tokenizer().eos_ids
    prompts = [tuple(common.encode(base, example.messages)) for example in examples]
    multihost.require_same("the prompts", lambda: prompts)
    return [
        Request(**sampling.drawing, prompt=p, n=n, seed=first + i * n, stop_ids=ends)
        for i, p in enumerate(prompts)
    ]


Completions = dict[str, list[list[Completion]]]
Scores = dict[str, tuple[list[np.ndarray], list[np.ndarray]]]


def _sample(
    config: Config,
    requests: Mapping[str, Sequence[Request]],
    pool: Pool,
    revisions: Mapping[str, Named],
    catalog: JobCatalog | None,
) -> tuple[Completions, Completions, Scores]:
    """Completions of every adapter, and of the base: each alone, and as many as there are slots for
    in one batch; scores of both.

    The scores are log-probabilities of the tokens drawn alone and of those drawn among others, one
    array a row, both by teacher forcing with the adapter alone. Alone it is loaded once more, into
    the only slot of a pool of its own: nothing that put it into the wrong slot of the shared batch
    is at work there.
    """
    base, names = pool.base, list(pool.digests)
    # a lone adapter has the base
    parties = [
        [*names[k : k + config.slots], BASE] for k in range(0, max(1, len(names)), config.slots)
    ]
    names.append(BASE)
    progress = Progress("evaluate", len(parties) + 2 * len(names))
    decode = base.need_tokenizer().decode
    engine, scorer = (
        Engine(base, decode, config.max_rows, cache_bytes=common.cache_bytes(config)),
        Scorer(base),
    )
    among: Completions = {}
    for k, party in enumerate(parties):
        with pool.hold(party) as held:
            among |= sample_together(engine, requests, held, party, "in one batch")
        progress.update(k + 1, f"{len(party)} in one batch")
    alone: Completions = {}
    scores: Scores = {}
    for k, text in enumerate(names):
        # it may stand for another revision by now
        name = revisions[text].digest if text in revisions else text
        with Pool(base, AdapterSource(base, catalog), [name], 1) as own, own.hold([name]) as held:
            slot = held.slot(name)
            alone |= sample_together(
                engine,
                requests,
                ResidentAdapters({text: slot} if slot else {}, held.stacks),
                [text],
                "alone",
            )
            progress.update(len(parties) + 2 * k + 1, f"{text or 'base'} alone")
            scores[text] = _scores(
                scorer, requests[text], (alone[text], among[text]), slot, held.stacks
            )
            progress.update(len(parties) + 2 * k + 2, f"{text or 'base'} scored")
    return alone, among, scores


def _scores(
    scorer: Scorer,
    requests: Sequence[Request],
    sampled: tuple[list[list[Completion]], list[list[Completion]]],
    slot: Slot | None,
    stacks: Stacks,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Log-probabilities of the sampled tokens of both batches; a row that both have is scored
    once.
    """
    rows = [
        [
            (r.prompt, tuple(c.tokens))
            for r, group in zip(requests, groups, strict=True)
            for c in group
        ]
        for groups in sampled
    ]
    apart = list(dict.fromkeys([*rows[0], *rows[1]]))
    values = scorer.logprobs(
        [(*prompt, *tokens) for prompt, tokens in apart], [slot] * len(apart), stacks
    )
    found = {row: row_values[len(row[0]) - 1 :] for row, row_values in zip(apart, values)}
    return [found[row] for row in rows[0]], [found[row] for row in rows[1]]


def sample_together(
    engine: Engine,
    requests: Mapping[str, Sequence[Request]],
    held: ResidentAdapters,
    names: Sequence[str],
    tenant: str,
) -> Completions:
    """Completions of each of several adapters' requests, in one batch.

    The requests of one example stand side by side, so that every group of rows that runs together
    is mixed. Under a tenant of its own a call reads its prompts itself: what another left of them
    in the cache would not be judged again.
    """
    asked = [
        (text, request)
        for same in zip(*(requests[text] for text in names), strict=True)
        for text, request in zip(names, same)
    ]
    mixed = [
        dataclasses.replace(request, adapter=held.slot(text), tenant=tenant)
        for text, request in asked
    ]
    out: Completions = {text: [] for text in names}
    for (text, _), completions in zip(asked, engine.generate(mixed, held.stacks)):
        out[text].append(completions)
    return out


def _record(
    catalog: JobCatalog,
    revision: Named,
    verdict: agreement.Agreement,
    metrics: dict[str, Any],
    about: dict[str, Any],
) -> None:
    def record() -> None:
        scores = {
            "isolated": verdict.isolated,
            "shared": verdict.shared,
            "tolerance": verdict.tolerance,
        }
        catalog.main.record_evaluation(str(revision), metrics=metrics, **scores, **about)

    multihost.agree("evaluation", record)
