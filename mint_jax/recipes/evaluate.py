"""Rewards of adapters, and of the bare base, on the held-out examples of an environment.

All are sampled in one batch, as a server does. A score is recorded in the catalog only if the
batch's log-probabilities are those of the adapter loaded alone (see ``check``). A revision is
sampled as in its training, except for ``config.sampling``; the base and PEFT directories as the
first revision with recorded settings.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mint_jax import multihost
from mint_jax.catalog.packed import digest_of
from mint_jax.envs import env as env_lib
from mint_jax.envs import scoring
from mint_jax.errors import UserError
from mint_jax.harness import report, start, workdir
from mint_jax.harness.adapters import AdapterSource, JobCatalog, Named, catalog_of
from mint_jax.harness.options import EvaluateSettings, GrpoSampling
from mint_jax.metrics import Progress
from mint_jax.residency.pool import Pool
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.score import Scorer

BASE = ""  # name of the bare base among adapters
# least rounding of a log-probability: 2**-17 and 2**-8
LEAST = {"float32": 1e-5, "bfloat16": 4e-3}
TIMES = 8.0  # a largest row is one draw from a tail


def run(config: EvaluateSettings, folder: Path) -> dict[str, Any]:
    """Evaluates ``config.adapters``; returns the result. Raises ``UserError`` if the batch served
    another adapter under one of the names; nothing is recorded then.
    """
    workdir.save_config(config, folder)
    environment, n = config.env.make(), config.samples
    env_lib.need_single_turn(config.env.name, environment)
    examples = environment.held_out[: config.examples]
    base = start.open_base(config)
    tokenizer = base.need_tokenizer()
    variables = config.env.chat_template_kwargs.extra
    prompts = [tuple(start.encode(base, example.messages, variables)) for example in examples]
    multihost.require_same("the prompts", lambda: prompts)
    about = {
        "renderer": _digest([*tokenizer.sources, variables]),
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
                    Request(p, n=n, seed=config.seed + i * n, stop_ids=tokenizer.eos_ids, **drawing)
                    for i, p in enumerate(prompts)
                ]
                for text, drawing in samplings.items()
            }
            drawn = _sample(config, requests, pool)
            errors = _errors(requests, drawn, pool, source.revisions, catalog)
        agreements = check(errors, np.dtype(base.dtype).name)
        for label, text in config.adapters.items():
            if not (found := agreements[text]).holds:
                raise UserError(
                    f"{label!r} ({text or 'the base'}): log-probabilities of a row of a shared"
                    f" batch are off by {found.worst_row_error:.2g} nats from those of the adapter"
                    f" loaded alone, of which {found.allowed_error:.2g} may be rounding; nothing is"
                    " recorded: find which of the two serves another adapter"
                )
        paired = [example for example in examples for _ in range(n)]

        def judge() -> dict[str, list[float]]:
            rows = {
                label: [(label, *row) for row in zip(drawn[text], paired, strict=True)]
                for label, text in config.adapters.items()
            }
            found = scoring.each(
                lambda row: scoring.score(row[0], environment, row[1].text or "", row[2]),
                list(rows.values()),
                environment,
            )
            return dict(zip(rows, found))

        watch = scoring.Watch(config.reward_timeout)
        rewards = multihost.agree("rewards", lambda: watch.over(judge))
        for label, row in rewards.items():
            scoring.check_any(label, np.array(row))
        rows = []
        for label, text in config.adapters.items():
            row = {"name": label, "adapter": text, "revision": pool.digests.get(text)}
            row |= _statistics(rewards[label]) | agreements[text]._asdict()
            rows.append(row | {"sampling": samplings[text], "samples": n})
            if catalog is not None and text in source.revisions:
                revision, score = str(source.revisions[text]), float(np.nanmean(rewards[label]))
                _record(catalog, revision, score, about, rows[-1])
    if multihost.is_main():
        columns = ("name", "reward", "standard_error")
        cells = [[row[c] for c in columns] for row in rows]
        report.table(f"{config.env.name}, held out", columns, cells)
    result = {"job": "evaluate", "env": config.env.name, "examples": len(examples), "samples": n}
    return result | {"base": base.fingerprint, **about, "results": rows}


def _digest(value: Any) -> str:
    return digest_of(json.dumps(value, sort_keys=True, default=str).encode())


def _statistics(rewards: Sequence[float]) -> dict[str, Any]:
    scored = [reward for reward in rewards if not math.isnan(reward)]
    n = len(scored)
    error = float(np.std(scored, ddof=1) / n**0.5) if n > 1 else 0.0
    out = {"reward": round(float(np.mean(scored)), 4), "standard_error": round(error, 4), "rows": n}
    return out | ({"given_up": len(rewards) - n} if n < len(rewards) else {})


def _record(
    catalog: JobCatalog, name: str, score: float, about: dict[str, Any], row: dict[str, Any]
) -> None:
    def write() -> None:  # the batch drew from the adapter itself: the score is also that alone
        catalog.main.record_evaluation(name, metrics=row, isolated=score, shared=score, **about)

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
    config: EvaluateSettings, requests: Mapping[str, Sequence[Request]], pool: Pool
) -> dict[str, list[Completion]]:
    """Returns the completions of each adapter and of the base, drawn in batches of
    ``config.slots`` adapters and the base.
    """
    names, decode = list(pool.digests), pool.base.need_tokenizer().decode
    groups = [names[k : k + config.slots] for k in range(0, len(names), config.slots)] or [[]]
    engine = Engine(pool.base, decode, **config.sampler)
    progress = Progress("sampling", len(groups))
    out: dict[str, list[Completion]] = {}
    for k, group in enumerate(groups, 1):
        with pool.hold([*group, BASE]) as resident:
            # requests of an example are neighbours, so that rows of all adapters run together
            order = [(text, i) for i in range(len(requests[BASE])) for text in (*group, BASE)]
            mixed = [
                dataclasses.replace(requests[text][i], adapter=resident.slot(text))
                for text, i in order
            ]
            out |= {text: [] for text in (*group, BASE)}
            for (text, _), completions in zip(order, engine.generate(mixed, resident.stacks)):
                out[text] += completions
        progress.update(k, f"{len(group) + 1} in one batch")
    return out


def _errors(
    requests: Mapping[str, Sequence[Request]],
    drawn: Mapping[str, Sequence[Completion]],
    pool: Pool,
    revisions: Mapping[str, Named],
    catalog: JobCatalog | None,
) -> dict[str, list[np.ndarray]]:
    """Returns the sampled log-probabilities minus those of the adapter loaded alone, one array a
    row.
    """
    scorer, progress, out = Scorer(pool.base), Progress("checking", len(drawn)), {}
    for text, completions in drawn.items():
        name = revisions[text].digest if text in revisions else text  # an alias may have moved
        prompts = [request.prompt for request in requests[text] for _ in range(request.n)]
        texts = [(*prompt, *c.tokens) for prompt, c in zip(prompts, completions, strict=True)]
        # Loaded again into a pool with a single slot: an error that puts the adapter into a wrong
        # slot of the batch must not repeat itself.
        own = Pool(pool.base, AdapterSource(pool.base, catalog), [name], 1)
        with own, own.hold([name]) as resident:
            slots = [resident.slot(name)] * len(texts)
            scored = scorer.logprobs(texts, slots, resident.stacks)
        out[text] = [
            np.subtract(c.logprobs, values[len(prompt) - 1 :])
            for c, prompt, values in zip(completions, prompts, scored)
        ]
        progress.update(len(out), f"{text or 'base'} alone")
    return out


class Agreement(NamedTuple):
    """Root mean square of a row's sampled log-probabilities minus those of the adapter loaded
    alone, nats, of the worst row, and the largest that may be rounding.
    """

    worst_row_error: float
    allowed_error: float

    @property
    def holds(self) -> bool:
        """True where the score may be recorded."""
        return self.worst_row_error <= self.allowed_error  # not for NaN


def check(errors: Mapping[str, Sequence[np.ndarray]], dtype: str) -> dict[str, Agreement]:
    """Compares a shared batch with its adapters loaded alone, by the errors of ``_errors``.

    Sampler and scorer round differently. The measure of that is the smallest error of an adapter or
    the base, which has no slot to be mistaken. Another adapter differs by tenths of a nat.
    """
    worst = {
        text: math.sqrt(np.max([np.mean(np.square(row)) for row in rows]))
        for text, rows in errors.items()
    }
    least = min([error for error in worst.values() if not math.isnan(error)], default=0.0)
    allowed = TIMES * max(LEAST[dtype], least)
    return {text: Agreement(error, allowed) for text, error in worst.items()}
