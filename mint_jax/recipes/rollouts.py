"""Rollouts: prompts of each policy's environment, completions that its adapter draws, and scored
episodes as groups to train on. An episode is one sampled continuation of a prompt, of one turn or
several: the policy's tokens are targets, the environment's in between have weight 0.

Axes: Q prompts, G completions or episodes of a prompt.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from mint_jax import metrics, multihost
from mint_jax.catalog import rollouts as catalog_rollouts
from mint_jax.envs import env as env_lib
from mint_jax.envs import processes
from mint_jax.envs.env import Example
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.harness.adapters import AdapterSource, JobCatalog
from mint_jax.harness.options import GrpoSampling, GrpoSettings
from mint_jax.harness.recorder import Snapshot
from mint_jax.harness.start import PolicyData
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.models import base as base_lib
from mint_jax.models import moe
from mint_jax.models.base import Base
from mint_jax.recipes import dialogues, parts
from mint_jax.recipes.dialogues import Dialogue
from mint_jax.residency.pool import Pool
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.train import advantages
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.trainer import Trainer


@dataclasses.dataclass
class Player:
    """An environment, and how its prompts are sampled; ``variables`` are the chat template's."""

    env: Any
    sampling: GrpoSampling
    variables: Mapping[str, Any]

    @property
    def converses(self) -> bool:
        """True if its environment answers each turn."""
        return env_lib.is_conversation(self.env)

    def opened(self, completions: list[list[Completion]]) -> list[list[Completion]]:
        """Returns first turns as conversations, if its environment answers them."""
        if not self.converses:
            return completions
        return [[dialogues.begun_by(c) for c in group] for group in completions]


@dataclasses.dataclass
class Member(Player, PolicyData):
    """A policy in training; ``train`` and ``held_out`` are token ids of prompts, ``turns_at_once``
    is the number of turns, or parts, that a completion may have between two updates. ``part`` is
    the largest number of tokens of a part; 0: completions are drawn whole.
    """

    turns_at_once: int = 1
    part: int = 0

    def begun(self, completions: list[list[Completion]]) -> list[list[Completion]]:
        """Returns first parts as unfinished completions, first turns as conversations."""
        if not self.part:
            return self.opened(completions)
        most = self.sampling.max_tokens
        return [[parts.begun_by(c, most) for c in group] for group in completions]


@dataclasses.dataclass
class Rollout:
    """Completions of one policy's step, by prompt.

    Attributes:
        drawn_by: the policy as it drew each turn of each prompt's completions, or a fixed
            revision's digest.
        rewards: of the first prompts, which are scored already.
        seeds: of each prompt.
        replies: the environment's answers to open conversations, in the first process; see
            ``dialogues.answered``.
    """

    examples: list[Example]
    prompts: list[list[int]]
    completions: list[list[Completion]]
    drawn_by: list[list[Snapshot | str]]
    rewards: list[list[float]] = dataclasses.field(default_factory=list)
    seeds: list[int] = dataclasses.field(default_factory=list)
    replies: list[list[Any]] = dataclasses.field(default_factory=list)

    @property
    def conversations(self) -> list[list[Dialogue]]:
        """The completions, if they are conversations."""
        groups = ([c for c in group if isinstance(c, Dialogue)] for group in self.completions)
        return list(filter(None, groups))

    @property
    def is_open(self) -> bool:
        """True while conversations or partial completions go on."""
        return bool(parts.open_ones(self.completions))

    @property
    def turns(self) -> int:
        """The largest number of turns of a completion so far."""
        return max(dialogues.turns_of(c)[-1] for group in self.completions for c in group)

    def marked(self, drawer: "Snapshot | str") -> "Rollout":
        """Returns the rollout with the one that drew the last turn of its conversations."""
        rows = zip(self.completions, self.drawn_by, strict=True)
        turns = [(max(dialogues.turns_of(c)[-1] for c in group), by) for group, by in rows]
        drawn_by = [[*by, drawer] if turn > len(by) else by for turn, by in turns]
        return dataclasses.replace(self, drawn_by=drawn_by)

    def extended(self, more: "Rollout | None", rewards: list[list[float]]) -> "Rollout":
        """Returns the rollout with further prompts, and the rewards of those so far."""
        more = Rollout([], [], [], []) if more is None else more
        columns = "examples", "prompts", "completions", "drawn_by", "seeds"
        joined: Any = {name: getattr(self, name) + getattr(more, name) for name in columns}
        return dataclasses.replace(self, **joined, rewards=rewards, replies=[])


def members_of(config: GrpoSettings, base: Base) -> dict[str, Member]:
    """Returns the policies with their prompts encoded; refuses prompts that leave no room for a
    completion.
    """
    members = {}
    for name, policy in config.policies.items():
        env, sampling = policy.env.make(), policy.sampling
        held_out = env.held_out[: config.eval.examples]
        variables = policy.env.chat_template_kwargs.extra
        train, held_out = (
            [start.encode(base, example.messages, variables) for example in examples]
            for examples in (env.train, held_out)
        )
        longest = max(map(len, train + held_out))
        if longest + sampling.max_tokens > base.cfg.context:
            raise UserError(
                f"policy {name!r}: a prompt of {longest} tokens and max_tokens"
                f" {sampling.max_tokens} exceed the context of {base.cfg.context}: lower max_tokens"
                " or drop long prompts"
            )
        own = start.policy_config(name, policy, config.seed)
        made = Member(own, train, held_out, sampling.prompts, env, sampling, variables)
        if made.converses:
            _check_conversation(name, base, made, config.partial_rollouts)
            made.turns_at_once = -(-sampling.max_turns // (config.max_staleness + 1))
        elif config.partial_rollouts:
            made.part = -(-sampling.max_tokens // (config.max_staleness + 1))
        members[name] = made
    prompts = [[m.train, m.held_out] for m in members.values()]
    multihost.require_same("the prompts", lambda: prompts)
    return members


def _check_conversation(name: str, base: Base, member: Member, partial: bool) -> None:
    """Raises ``UserError`` if a policy's settings or its base do not allow further turns."""
    if partial:
        raise UserError(
            f"policy {name!r}: partial_rollouts is True, and its environment is a conversation,"
            " whose turns are spread over the updates anyway: drop partial_rollouts"
        )
    if member.sampling.overlong_tokens:
        raise UserError(
            f"policy {name!r}: overlong_tokens is {member.sampling.overlong_tokens}, which measures"
            " one completion, and its environment is a conversation: set it to 0"
        )
    for split in (member.env.train, member.env.held_out):
        dialogues.check_continues(base.need_tokenizer(), split[0], member.variables)


class PolicySampler:
    """Samples policies in training, with their current adapters in the trainer's own slots.

    Attributes:
        tokens: number of tokens sampled in this process.
        fixed: digest and slot of policies that sample from another adapter than their own.
    """

    def __init__(
        self, config: GrpoSettings, base: Base, members: Mapping[str, Member], trainer: Trainer
    ):
        self.config, self.base, self.members, self.trainer = config, base, members, trainer
        tokenizer, samplings = base.need_tokenizer(), [m.sampling for m in members.values()]
        self.engine = Engine(
            base,
            tokenizer.decode,
            **config.sampler,
            keep_routes=base.cfg.routed and any(s.replay for s in samplings),
            # for the next turns, until an update: the blocks of a turn's prompt
            keep_cache=any(member.converses for member in members.values()),
        )
        self.stop_ids, self.tokens = tokenizer.eos_ids, 0
        # Last completions of a policy's prompt: drafts for the next ones. Held-out prompts have the
        # same seeds at each evaluation, so a small update changes few of their tokens.
        self._last = dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], ...]]()
        self._workers: processes.WorkerPool | None = None
        self.fixed, self._stacks = dict[str, tuple[str, Slot]](), Stacks()
        self._snapshot: Callable[[str], Snapshot | str] = lambda name: ""

    def score_in_processes(self) -> bool:
        """Moves the environments to worker processes, if the config asks for them, until
        ``sampling_from`` ends.
        """
        config = self.config
        if not config.reward_processes or not multihost.is_main():
            return False
        self._workers = processes.WorkerPool(config.reward_processes, config.reward_timeout)
        for name, member in self.members.items():
            made_by = config.policies[name].env.name, config.policies[name].env.extra
            member.env = processes.remote(member.env, self._workers, *made_by)
        return True

    @contextlib.contextmanager
    def sampling_from(
        self,
        fixed: dict[str, str],
        catalog: JobCatalog,
        snapshot: Callable[[str], Snapshot | str],
    ) -> Iterator[None]:
        """In this block these policies sample from other adapters, by digest or PEFT directory;
        rollouts of others carry their ``snapshot``.
        """
        names, source = list(fixed.values()), AdapterSource(self.base, catalog)
        pool = Pool(self.base, source, names, max(1, len(names)), start.say)
        with pool, pool.hold(names) as resident:
            self.fixed = {n: (pool.digests[t], resident.slots[t]) for n, t in fixed.items()}
            self._stacks, self._snapshot = resident.stacks, snapshot
            try:
                yield
            finally:
                self.fixed, self._stacks = {}, {}
                if self._workers is not None:
                    self._workers.close()

    def rollout(
        self, names: Sequence[str], step: int, spans: Mapping[str, range] = MappingProxyType({})
    ) -> dict[str, Rollout]:
        """Samples the prompts of a step: one engine call for policies that sample themselves, and
        one for those with fixed adapters. ``spans`` are places in the order of a policy's prompts
        in this step, by default those of the first draw.
        """
        return self.draw(names, step, spans)[0]

    def draw(
        self,
        names: Sequence[str],
        step: int,
        spans: Mapping[str, range] = MappingProxyType({}),
        unfinished: Mapping[tuple[int, str], Rollout] = MappingProxyType({}),
    ) -> tuple[dict[str, Rollout], dict[tuple[int, str], Rollout]]:
        """Samples as ``rollout``, and in the same call the next part of ``unfinished`` rollouts by
        step and policy; returns these too.
        """
        order = multihost.agree(
            "data order", lambda: {n: self._draw(n, step, spans.get(n)) for n in names}
        )
        out, rest = dict[str, Rollout](), dict[str, Iterator[list[Completion]]]()
        for is_fixed in (False, True):
            rows = []
            for name in names:
                if (name in self.fixed) == is_fixed:
                    member = self.members[name]
                    n, most = member.sampling.group_size, member.part or member.sampling.max_tokens
                    rows += [(name, member.train[i], n, seed, most) for i, seed in order[name]]
            for (_, name), rollout in unfinished.items() if not is_fixed else ():
                rows += parts.rows_of(name, self.members[name], rollout)
            for name, completions in self.sample(rows, is_fixed).items():
                new = len(order.get(name, ()))
                made, drawers = self.members[name].begun(completions[:new]), [self.drawer(name)]
                if new:
                    out[name] = self._rollout(name, order[name], made, [drawers] * new)
                rest[name] = iter(completions[new:])
                self.tokens += sum(len(c.tokens) for group in completions for c in group)
        decode = self.base.need_tokenizer().decode
        grown = {
            (step, n): parts.grown(self.members[n], one, rest[n], decode).marked(self.drawer(n))
            for (step, n), one in unfinished.items()
        }
        return {name: out[name] for name in names}, grown

    def drawer(self, name: str) -> "Snapshot | str":
        """Returns what a policy's rollouts are drawn by: its present adapter, or a fixed digest."""
        return self.fixed[name][0] if name in self.fixed else self._snapshot(name)

    def restored(
        self, name: str, step: int, completions: list[list[Completion]], drawn_by: list[Any]
    ) -> Rollout:
        """Returns a step's first prompts with the completions that were drawn for them before."""
        order = self._draw(name, step, range(len(completions)))
        return self._rollout(name, order, completions, drawn_by)

    def _rollout(self, name: str, order: Sequence[tuple[int, int]], *drawn: Any) -> Rollout:
        member, seeds = self.members[name], [seed for _, seed in order]
        examples = [member.env.train[i] for i, _ in order]
        return Rollout(examples, [member.train[i] for i, _ in order], *drawn, seeds=seeds)

    def _draw(self, name: str, step: int, span: range | None) -> list[tuple[int, int]]:
        """Returns the index and the seed of each prompt of a step."""
        member = self.members[name]
        chosen = member.chosen(step)
        span = span or range(len(chosen))
        if span.stop > len(chosen):
            chosen += member.further(step)
        # the first seeds are the same whatever their number
        seeds = np.random.SeedSequence([member.config.seed, step]).generate_state(span.stop)
        return [(chosen[i], int(seeds[i])) for i in span]

    def held_out(self, names: Sequence[str]) -> dict[str, Rollout]:
        """Samples the held-out prompts with the policies as they are, with seeds of their own."""
        n = self.config.eval.samples
        rows = [(a, p, n, i * n) for a in names for i, p in enumerate(self.members[a].held_out)]
        progress, ended = metrics.Progress("evaluating", len(rows)), list[int]()

        def finished(some: dict[int, Any]) -> None:
            ended.extend(some)
            progress.update(len(ended), "prompts")

        drawn, out = self.sample(rows, False, finished), {}
        for name in names:
            member, made = self.members[name], self.members[name].opened(drawn[name])
            examples = list(member.env.held_out[: len(member.held_out)])
            seeds = [i * n for i in range(len(examples))]
            out[name] = Rollout(examples, member.held_out, made, [], seeds=seeds)
        return out

    def sample(
        self, rows: Sequence[tuple[Any, ...]], is_fixed: bool, *finished: Any
    ) -> dict[str, list[list[Completion]]]:
        """Samples rows of policy, prompt, number of completions and seed, and the largest number of
        tokens if it is not the policy's, in one engine call.
        """
        requests, out = [], {name: [] for name, *_ in rows}
        for name, prompt, n, seed, *limit in rows:
            weights: dict[str, Any] = {"version": self.trainer.versions[name]}
            slot = self.trainer.slots[name]
            if is_fixed:
                digest, slot = self.fixed[name]
                weights = {"revision": digest}
            drawing = self.members[name].sampling.drawing
            how: Any = {"n": n, "seed": seed, "stop_ids": self.stop_ids, **drawing, **weights}
            how["drafts"] = self._last.get((name, tuple(prompt)), ())
            how["max_tokens"] = limit[0] if limit else drawing["max_tokens"]
            requests.append(Request(tuple(prompt), slot, **how))
        stacks = self._stacks if is_fixed else self.trainer.stacks
        drawn = self.engine.generate(requests, stacks, *finished)
        for (name, prompt, *_), some in zip(rows, drawn):
            out[name].append(some)
            member = self.members[name]
            if self.config.speculative_tokens and not (member.converses or member.part):
                self._last[name, tuple(prompt)] = tuple(tuple(c.tokens) for c in some)
        return out


def trainer_base(base: Base, config: GrpoSettings) -> Base:
    """Returns the trainer's base: the sampler's, unless the config studies a mismatch of the two by
    noise on the weights of its routers, or by a second base of another dtype.
    """
    dtype, quantise = config.trainer_dtype or config.dtype, config.trainer_quantise
    quantise = config.quantise if quantise is None else quantise
    if base_lib.DTYPES.get(dtype) != base.dtype or quantise != config.quantise:
        how: Any = {"quantise": quantise, "kernels": base.cfg.kernels}
        base = base_lib.load(config.base, base.mesh, dtype, **how)
        start.say(f"the trainer has a base of its own in {quantise or dtype}")
    if not (std := config.router_noise):
        return base
    if not base.cfg.routed:
        raise UserError(f"router_noise is {std}, but {base.name} has no experts: set it to 0")
    noisy = moe.perturb(base.params, std, jax.random.key(config.seed))
    return dataclasses.replace(base, params=noisy)


def overlong_penalty(sampling: GrpoSampling, rollout: Rollout) -> np.ndarray:
    """Returns what is added to the rewards, ``[Q, G]``: 0 for completions that leave
    ``overlong_tokens`` of ``max_tokens``, from there down to -1 (DAPO, arXiv 2503.14476 eq. 13).
    """
    lengths_QG = np.array([[len(c.tokens) for c in group] for group in rollout.completions])
    soft = sampling.overlong_tokens
    over_QG = (lengths_QG - (sampling.max_tokens - soft)) / max(soft, 1)
    return -np.clip(over_QG, 0.0, float(soft > 0))


def shaped_advantages(
    sampling: GrpoSampling, rollout: Rollout, rewards_QG: np.ndarray
) -> np.ndarray:
    """Returns the advantages of rewards with their penalty, ``[Q, G]``. Rows without a reward (NaN)
    have 0, and the others of their prompt are compared without them.
    """
    shaped_QG = rewards_QG + overlong_penalty(sampling, rollout)
    how = sampling.baseline, sampling.divide_by_std
    if not np.isnan(shaped_QG).any():
        return advantages.group_advantages(shaped_QG, *how)
    out_QG = np.zeros(shaped_QG.shape, np.float32)
    for q, row in enumerate(shaped_QG):
        scored = ~np.isnan(row)
        if scored.sum() > (sampling.baseline != "none"):  # one alone has nothing to compare with
            out_QG[q, scored] = advantages.group_advantages(row[None, scored], *how)[0]
    return out_QG


def trained(
    sampling: GrpoSampling, rollout: Rollout, rewards_QG: np.ndarray
) -> tuple[Rollout, np.ndarray]:
    """Returns the prompts that are trained on: as many as a step has, preferably those whose
    advantages are not all 0 (dynamic sampling, DAPO, arXiv 2503.14476 section 3.2).
    """
    differs_Q = shaped_advantages(sampling, rollout, rewards_QG).any(axis=1)
    best = np.sort(np.argsort(~differs_Q, kind="stable")[: sampling.prompts])
    columns = rollout.examples, rollout.prompts, rollout.completions, rollout.drawn_by
    chosen = ([column[q] for q in best if column] for column in columns)
    return Rollout(*chosen), rewards_QG[best]


def missing_prompts(
    sampling: GrpoSampling, rollout: Rollout, rewards_QG: np.ndarray, available: int
) -> int:
    """Returns how many further prompts to draw, of ``available`` ones: as many as are likely to
    replace those whose advantages are all 0.
    """
    drawn = len(rollout.prompts)
    useful = int(shaped_advantages(sampling, rollout, rewards_QG).any(axis=1).sum())
    likely = -(-(sampling.prompts - useful) * drawn // max(useful, 1))
    most = sampling.prompts * (1 + sampling.resample) - drawn
    return max(0, min(likely, sampling.prompts, most, available - drawn))


def rollout_metrics(
    sampling: GrpoSampling, rollout: Rollout, rewards_QG: np.ndarray
) -> dict[str, float]:
    """Returns metrics of scored rollouts; ``reward_std`` is within a prompt."""
    drawn = [c for group in rollout.completions for c in group]
    lengths = [sum(dialogues.drawn_mask(c)) for c in drawn]
    advantage = shaped_advantages(sampling, rollout, rewards_QG)
    own, given_up_QG = {}, np.isnan(rewards_QG)
    if given_up_QG.any():
        own["given_up"] = float(given_up_QG.mean())
    by_prompt = [row[~np.isnan(row)] for row in rewards_QG]
    if sampling.overlong_tokens:
        own["overlong_penalty"] = float(overlong_penalty(sampling, rollout).mean())
    if sampling.resample:
        own["prompts"] = len(rollout.prompts)
    if turns := [len(d.texts) for group in rollout.conversations for d in group]:
        own["turns"] = float(np.mean(turns))
    return own | {
        "reward": float(np.concatenate(by_prompt).mean()),
        "reward_std": float(np.mean([row.std() for row in by_prompt if len(row)])),
        "completion_tokens": float(np.mean(lengths)),
        "shortest": min(lengths),
        "longest": max(lengths),
        "sampled_tokens": sum(lengths),
        "truncated": float(np.mean([c.finish == "length" for c in drawn])),
        "zero_advantage": float((advantage == 0).all(axis=1).mean()),
    }


def as_record(rollout: Rollout, rewards_QG: np.ndarray) -> catalog_rollouts.Rollouts:
    """Returns scored rollouts as the catalog keeps them."""
    tokens = [[c.tokens for c in group] for group in rollout.completions]
    logprobs = [[c.logprobs for c in group] for group in rollout.completions]
    digests = [
        ["", *(d if isinstance(d, str) else d.digest for d in by)] for by in rollout.drawn_by
    ]
    drawn_by = [
        [[by[turn] for turn in dialogues.turns_of(c)] for c in group]
        for by, group in zip(digests, rollout.completions)
    ]
    made = tokens, logprobs, drawn_by, rewards_QG
    return catalog_rollouts.Rollouts("", 0, rollout.prompts, *made)


@dataclasses.dataclass(frozen=True)
class Episode:
    """Tokens of all turns that a policy and its environment wrote after a prompt.

    Attributes:
        drawn: whether the policy drew each of ``tokens``.
        logprobs: under the distribution sampled at ``temperature``; 0 for tokens not drawn.
        routes, prompt_routes: recorded experts of ``tokens`` and of ``prompt``; see ``Completion``.
    """

    prompt: list[int]
    tokens: list[int]
    drawn: list[bool]
    logprobs: list[float]
    temperature: float
    routes: np.ndarray | None = None
    prompt_routes: np.ndarray | None = None


def of_completion(prompt: Sequence[int], completion: Completion, temperature: float) -> Episode:
    """Returns the episode of a completion or a conversation."""
    c, drawn = completion, dialogues.drawn_mask(completion)
    routes = c.routes, c.prompt_routes
    return Episode(list(prompt), c.tokens, drawn, c.drawn_logprobs, temperature, *routes)


def to_groups(
    episodes: Sequence[Sequence[Episode]],
    advantages_QG: np.ndarray,
    normalisation: str = "token",
    max_tokens: int = 1,
) -> list[Group]:
    """Returns the groups of one update; ``train.advantages`` has normalisations, and ``max_tokens``
    is the divisor of ``constant``.
    """
    lengths = [sum(one.drawn) for group in episodes for one in group]
    weights = iter(advantages.token_weights(lengths, normalisation, max_tokens))
    out = []
    for group, values in zip(episodes, advantages_QG, strict=True):
        sequences = []
        for one, value in zip(group, values, strict=True):
            weight = next(weights)
            by_token = [weight if drawn else 0.0 for drawn in one.drawn]
            sequence = one.tokens, by_token, [float(value)] * len(one.tokens), one.logprobs
            sequences.append(TrainSequence(*sequence, routes=one.routes))
        first = group[0]
        shared: Any = {"routes": first.prompt_routes, "temperature": first.temperature}
        out.append(Group(first.prompt, sequences, **shared))
    return out


def rollout_groups(sampling: GrpoSampling, rollout: Rollout, rewards_QG: np.ndarray) -> list[Group]:
    """Returns scored rollouts as groups to train on, with advantages."""
    without: Any = {} if sampling.replay else {"routes": None, "prompt_routes": None}

    def episode(prompt: list[int], c: Completion, reward: float) -> Episode:
        masked = {}
        is_cut = sampling.mask_truncated and c.finish == "length"  # DAPO, section 3.4
        if is_cut or np.isnan(reward):
            masked["drawn"] = [False] * len(c.tokens)
        made = of_completion(prompt, c, sampling.temperature)
        return dataclasses.replace(made, **without, **masked)

    rows = zip(rollout.prompts, rollout.completions, rewards_QG, strict=True)
    made = [[episode(p, c, r) for c, r in zip(group, row)] for p, group, row in rows]
    advantages_QG = sampling.reward_weight * shaped_advantages(sampling, rollout, rewards_QG)
    return to_groups(made, advantages_QG, sampling.normalisation, sampling.max_tokens)
