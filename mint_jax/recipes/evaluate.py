"""Rewards of adapters, and of the bare base, on the held-out examples of an environment.

All are sampled in one batch, as a server does, and a conversation turn by turn. A score is recorded
in the catalog only if the batch's log-probabilities are those of the adapter loaded alone (see
``check``). A revision is sampled as in its training, except for ``config.sampling``; the base and
PEFT directories as the first revision with recorded settings.
"""

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
from mint_jax.envs.env import Example
from mint_jax.errors import UserError
from mint_jax.harness import report, start, workdir
from mint_jax.harness.adapters import AdapterSource, JobCatalog, Named, catalog_of
from mint_jax.harness.options import EvaluateSettings, GrpoSampling
from mint_jax.metrics import Progress
from mint_jax.recipes import dialogues, turns
from mint_jax.recipes.rollouts import Player, Rollout
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
    examples = list(environment.held_out[: config.examples])
    base = start.open_base(config)
    tokenizer = base.need_tokenizer()
    variables = config.env.chat_template_kwargs.extra
    if converses := env_lib.is_conversation(environment):
        dialogues.check_continues(tokenizer, examples[0], variables)
    prompts = [start.encode(base, example.messages, variables) for example in examples]
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
            samplings = _samplings(config, converses, names, source.revisions, catalog)
            sampler = AdapterSampler(config, pool, environment, samplings)
            drawn = sampler.rollouts(examples, prompts)
            asked = {text: drawn[text] for text in config.adapters.values()}
            scored = turns.played(sampler, asked, scoring.Watch(config.reward_timeout))
            drawn |= {text: rollout for text, (rollout, _) in scored.items()}
            errors = _errors(drawn, pool, source.revisions, catalog)
        agreements = check(errors, np.dtype(base.dtype).name)
        for label, text in config.adapters.items():
            if not (found := agreements[text]).holds:
                raise UserError(
                    f"{label!r} ({text or 'the base'}): log-probabilities of a row of a shared"
                    f" batch are off by {found.worst_row_error:.2g} nats from those of the adapter"
                    f" loaded alone, of which {found.allowed_error:.2g} may be rounding; nothing is"
                    " recorded: find which of the two serves another adapter"
                )
        rows = []
        for label, text in config.adapters.items():
            row = {"name": label, "adapter": text, "revision": pool.digests.get(text)}
            rewards = [reward for group in scored[text][1] for reward in group]
            row |= _statistics(rewards) | agreements[text]._asdict()
            rows.append(row | {"sampling": samplings[text], "samples": n})
            if catalog is not None and text in source.revisions:
                revision, score = str(source.revisions[text]), float(np.nanmean(rewards))
                listed = [
                    [None if r != r else float(r) for r in group] for group in scored[text][1]
                ]
                _record(catalog, revision, score, about, rows[-1] | {"rewards": listed})
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
    converses: bool,
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
    usual: dict[str, Any] = GrpoSampling().drawing | {"max_turns": GrpoSampling().max_turns}
    for text in (*names, BASE):
        values = usual | trained.get(text, first) | config.sampling.given
        if not converses:
            del values["max_turns"]
        out[text] = values | {"stop": tuple(values["stop"])}
    return out


class AdapterSampler:
    """Samples a pool's adapters, by name, in batches of ``config.slots`` and the base; a
    ``turns.TurnSampler``.
    """

    def __init__(
        self,
        config: EvaluateSettings,
        pool: Pool,
        environment: Any,
        samplings: Mapping[str, Mapping[str, Any]],
    ):
        self.config, self.pool, self.base = config, pool, pool.base
        self.engine = Engine(pool.base, pool.base.need_tokenizer().decode, **config.sampler)
        self.tokens, self.fixed, variables = 0, {}, config.env.chat_template_kwargs.extra
        self.members, self.drawing = dict[str, Player](), dict[str, dict[str, Any]]()
        for text, values in samplings.items():
            limits = {name: values[name] for name in ("max_tokens", "max_turns") if name in values}
            self.members[text] = Player(environment, GrpoSampling(**limits), variables)
            self.drawing[text] = {k: value for k, value in values.items() if k != "max_turns"}

    def rollouts(self, examples: list[Example], prompts: list[list[int]]) -> dict[str, Rollout]:
        """Samples every prompt with every adapter and the base."""
        n = self.config.samples
        seeds = [self.config.seed + i * n for i in range(len(prompts))]
        # rows of an example are neighbours, so that rows of all adapters run together
        rows = [(text, p, n, seed) for p, seed in zip(prompts, seeds) for text in self.members]
        return {
            text: Rollout(examples, prompts, self.members[text].opened(drawn), [], seeds=seeds)
            for text, drawn in self.sample(rows, False).items()
        }

    def sample(
        self, rows: Sequence[tuple[str, list[int], int, int]], is_fixed: bool
    ) -> dict[str, list[list[Completion]]]:
        """Samples rows of adapter, prompt, number of completions and seed, in batches."""
        names, slots = list(self.pool.digests), self.config.slots
        groups = [names[k : k + slots] for k in range(0, len(names), slots)] or [[]]
        progress = Progress("sampling", len(groups))
        out: dict[str, list[list[Completion]]] = {name: [] for name, *_ in rows}
        for k, group in enumerate(groups, 1):
            here = [row for row in rows if row[0] in group or (k == 1 and row[0] == BASE)]
            with self.pool.hold([*group, BASE]) as resident:
                requests = []
                for text, prompt, n, seed in here:
                    how: Any = {
                        "n": n,
                        "seed": seed,
                        "stop_ids": self.base.need_tokenizer().eos_ids,
                    }
                    how |= {"revision": self.pool.digests.get(text), **self.drawing[text]}
                    requests.append(Request(tuple(prompt), resident.slot(text), **how))
                for (text, *_), some in zip(here, self.engine.generate(requests, resident.stacks)):
                    out[text].append(some)
            progress.update(k, f"{len(group) + 1} in one batch")
        return out


def _errors(
    drawn: Mapping[str, Rollout],
    pool: Pool,
    revisions: Mapping[str, Named],
    catalog: JobCatalog | None,
) -> dict[str, list[np.ndarray]]:
    """Returns the sampled log-probabilities minus those of the adapter loaded alone, one array a
    row, at the tokens that the adapter drew.
    """
    scorer, progress, out = Scorer(pool.base), Progress("checking", len(drawn)), {}
    for text, rollout in drawn.items():
        name = revisions[text].digest if text in revisions else text  # an alias may have moved
        groups = zip(rollout.prompts, rollout.completions, strict=True)
        rows = [(prompt, c) for prompt, group in groups for c in group]
        texts = [(*prompt, *c.tokens) for prompt, c in rows]
        # Loaded again into a pool with a single slot: an error that puts the adapter into a wrong
        # slot of the batch must not repeat itself.
        own = Pool(pool.base, AdapterSource(pool.base, catalog), [name], 1)
        with own, own.hold([name]) as resident:
            slots = [resident.slot(name)] * len(texts)
            scored = scorer.logprobs(texts, slots, resident.stacks)
        out[text] = [
            np.subtract(c.logprobs, values[len(prompt) - 1 :])[dialogues.drawn_mask(c)]
            for (prompt, c), values in zip(rows, scored, strict=True)
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
