"""Routing of prompts over a catalog: what ``auto`` earns and loads, what requests that name their
policy and other ways to choose do, and the time of a decision.

Policies that each write the date in one language, ``copies`` of every language by different users,
are really trained, and every held-out prompt is scored under every policy: its reward is the
geometric mean probability of the right text's tokens. Then requests are drawn from these, Zipf over
the policies, and routed one after the other by the product's index and bandit, over a least
recently used set of ``slots``. ``distractors`` further policies have vectors between those of other
prompts; one that is chosen answers as a random policy of another language does. ``auto 10``: of a
bandit to which a second of waiting costs 10 % of the largest reward. ``best of the nearest
language`` and ``composed`` know the languages and have scored examples of each (LORAUTER, arXiv
2601.21795).
"""

import abc
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.bases import open_base
from benchmarks.merges import date_rows, logprobs
from mint_jax.api import store as store_lib
from mint_jax.api.model import Model
from mint_jax.harness import report as report_lib
from mint_jax.metrics import Progress
from mint_jax.residency.tier import Tier
from mint_jax.rollout.embed import Embedder
from mint_jax.routing.bandit import Arm, Bandit
from mint_jax.routing.index import Near, RouteIndex

BASE = "base"
COMPOSED, TEMPERATURE = 3, 0.2  # languages whose policies answer together, and of their weights
CANDIDATES = 8  # as of service/routes.py
OTHER = (
    *("{0} + {1} =", "Write a poem about {0} cats.", "Is {0} a prime number?", "def add_{0}(x):"),
    *("The capital of country {0} is", "Translate to French: {0} dogs", "Sort: {1}, {0}, 7"),
    *("Once upon a time, {0} years ago,", '{{"id": {0}, "value":', "Summarise chapter {0}:"),
)


@dataclasses.dataclass(frozen=True)
class World:
    """Policies and prompts that requests are drawn from; P policies, Q prompts.

    Attributes:
        policies: names, ``LANGUAGE-COPY``, and the language of each.
        languages: of each prompt; those of no policy come last.
        rewards: ``[P + 1, Q]``, the last row is the base's.
        vectors: of the prompts, ``[Q, dims]``.
        described: of the policies, ``[P, dims]``.
        others: of the distractors, ``[n, dims]``.
        best: the best policy of every language by the rewards of prompts other than this one, for
            the ``COMPOSED`` languages with the nearest mean vectors, ``[Q, COMPOSED]``.
        composed: rewards of each prompt under the weighted sum of the deltas of these, ``[Q]``.
    """

    policies: Sequence[str]
    languages: Sequence[str]
    rewards: np.ndarray
    vectors: np.ndarray
    described: np.ndarray
    others: np.ndarray
    best: np.ndarray
    composed: np.ndarray

    def of(self, language: str) -> list[int]:
        """Returns the numbers of a language's policies."""
        return [i for i, name in enumerate(self.policies) if name.startswith(f"{language}-")]


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    rng, base = np.random.default_rng(config.seed), open_base(config)
    report = _routing(config, base, workdir, rng) if config.languages else {}
    if config.records:
        vectors = Embedder(base)(_other_prompts(base, rng))
        found = {str(count): _decisions(config, vectors, count) for count in config.records}
        times = [[count, *(x["percentile"] for x in one.values())] for count, one in found.items()]
        report_lib.table("time of a decision, ms", ("policies", "p50", "p99"), times)
        report |= {"decisions": found}
    return report


def _routing(config: Any, base: Any, workdir: Path, rng: np.random.Generator) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place, store_lib.open(place, create=True) as store:
        names = [f"{one}-{i}" for one in config.languages for i in range(config.copies)]
        with Model(base, config.seed) as model:
            _train(config, model, rng, names, store)
        world = _world(config, base, store, names, rng)
    report: dict[str, Any] = {"policies": len(names), "languages": len(config.languages)}
    report |= {key: config[key] for key in ("copies", "slots", "requests", "distractors")}
    report["load_s"], index = config.load_s, _index(world)
    routers: dict[str, Callable[[np.random.Generator], _Router]] = {
        "named": lambda rng: _Named(world),
        **{
            f"auto {100 * cost:g}": lambda rng, cost=cost: _Auto(world, index, config, cost, rng)
            for cost in config.costs
        },
        "nearest": lambda rng: _Nearest(world, index),
        "best of the nearest language": lambda rng: _ByTask(world, 1),
        "composed": lambda rng: _ByTask(world, COMPOSED),
        "the base": lambda rng: _Base(world),
    }
    report["routers"] = _routers(config, world, routers)
    report["unseen"] = _unseen(config, world, index)
    _show(report)
    _draw(report, workdir / "routes.png")
    return report


# -- policies, rewards and vectors


def _train(
    config: Any, model: Model, rng: np.random.Generator, names: Sequence[str], store: Any
) -> None:
    for i, name in enumerate(names):
        model.policy(name, config.rank, alpha=config.alpha, learning_rate=config.rate, seed=i)
    progress = Progress("training", config.steps)
    for step in range(1, config.steps + 1):
        metrics: dict[str, Any] = {}
        for first in range(0, len(names), config.together):  # memory grows with their rows
            group = names[first : first + config.together]
            rows = {n: date_rows(config, n.partition("-")[0], rng, config.batch) for n in group}
            metrics |= model.train_step({**rows})
        progress.update(step, f"loss {np.mean([metrics[n]['loss'] for n in names]):.3f}")
    for policy in model.policies.values():
        policy.save(store)


def _world(
    config: Any, base: Any, store: Any, names: Sequence[str], rng: np.random.Generator
) -> World:
    tokenizer, embed = base.need_tokenizer(), Embedder(base)
    languages = [one for one in (*config.languages, *config.unseen) for _ in range(config.held_out)]
    rows = [date_rows(config, one, rng, 1)[0] for one in languages]
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    texts = [
        (*prompt, *tokenizer.encode(row["completion"], special=False))
        for prompt, row in zip(prompts, rows)
    ]
    digests = [store[f"{name}@latest"].digest for name in names] + [None]
    found = logprobs(config, base, store, [d for d in digests for _ in texts], texts * len(digests))
    rewards = np.reshape(
        [_reward(v, p) for v, p in zip(found, prompts * len(digests))], (-1, len(texts))
    )
    described = []
    for name in timing.counted("describing", names):
        examples = date_rows(config, name.partition("-")[0], rng, config.examples)
        described.append(embed([tokenizer.encode(row["prompt"]) for row in examples]).mean(0))
    vectors = embed([*prompts, *_other_prompts(base, rng)])
    own, described = vectors[: len(prompts)], np.array(described)
    best, weights = _nearest_languages(config, names, languages, rewards, own, described)
    merges = [
        store.catalog.merge(f"merge {i}", [f"{names[m]}@latest" for m in some], w.tolist()).digest
        for i, (some, w) in enumerate(zip(timing.counted("composing", best), weights))
    ]
    found = logprobs(config, base, store, merges, texts)
    return World(
        names,
        languages,
        rewards,
        own,
        described,
        _between(vectors[len(prompts) :], config.distractors, rng),
        best,
        np.array([_reward(values, prompt) for values, prompt in zip(found, prompts)]),
    )


def _reward(logprobs: np.ndarray, prompt: Sequence[int]) -> float:
    """Returns the geometric mean probability of the tokens after the prompt."""
    return float(np.exp(logprobs[len(prompt) - 1 :].mean()))


def _nearest_languages(
    config: Any,
    policies: Sequence[str],
    languages: Sequence[str],
    rewards: np.ndarray,
    vectors: np.ndarray,
    described: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``World.best`` and the softmax of the cosines, ``[Q, COMPOSED]`` each."""
    tasks = [name.partition("-")[0] for name in policies]
    own = {task: [i for i, one in enumerate(tasks) if one == task] for task in config.languages}
    means = np.array([described[rows].mean(0) for rows in own.values()])
    centre = means.mean(0)
    means, vectors = means - centre, vectors - centre
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    cosines = vectors @ means.T / np.linalg.norm(vectors, axis=1, keepdims=True)
    nearest = np.argsort(-cosines, axis=1)[:, :COMPOSED]
    best = np.empty(nearest.shape, int)
    for prompt, row in enumerate(nearest):
        for at, task in enumerate(np.array(config.languages)[row].tolist()):
            others = [i for i, one in enumerate(languages) if one == task and i != prompt]
            best[prompt, at] = own[task][int(rewards[own[task]][:, others].mean(1).argmax())]
    weights = np.exp(np.take_along_axis(cosines, nearest, 1) / TEMPERATURE)
    return best, weights / weights.sum(1, keepdims=True)


def _other_prompts(base: Any, rng: np.random.Generator) -> list[list[int]]:
    encode = base.need_tokenizer().encode
    return [encode(text.format(*rng.integers(99, size=2))) for text in OTHER for _ in range(8)]


def _between(vectors: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns random means of three vectors, ``[count, dims]``, with noise of a tenth of their
    spread.
    """
    chosen = vectors[rng.integers(len(vectors), size=(count, 3))].mean(1)
    return (chosen + 0.1 * vectors.std(0) * rng.normal(size=chosen.shape)).astype(np.float16)


def _index(world: World) -> RouteIndex:
    index = RouteIndex(world.vectors.shape[1])
    others = [f"other {i}" for i in range(len(world.others))]
    vectors = np.concatenate([world.described.astype(np.float16), world.others])
    index.put([*world.policies, *others], vectors)
    return index


# -- routers


class _Router(abc.ABC):
    """Chooses the policies that answer a prompt together: none: the base; -1: a distractor."""

    def __init__(self, world: World):
        self.world = world

    @abc.abstractmethod
    def choose(self, prompt: int, named: int, resident: Callable[[int], bool]) -> Sequence[int]: ...

    def reward(self, reward: float) -> None:
        """Takes the reward of the last choice."""
        del reward  # most learn nothing


class _Named(_Router):
    def choose(self, prompt, named, resident):
        return [named]


class _Base(_Router):
    def choose(self, prompt, named, resident):
        return []


class _Nearest(_Router):
    """The policy of the largest cosine."""

    def __init__(self, world: World, index: RouteIndex):
        super().__init__(world)
        number: dict[Any, int] = {name: i for i, name in enumerate(world.policies)}
        self.first = [number.get(index.nearest(v, 1)[0].key, -1) for v in world.vectors]

    def choose(self, prompt, named, resident):
        return [self.first[prompt]]


class _ByTask(_Router):
    """The best policies of the nearest languages, ``World.best``."""

    def __init__(self, world: World, count: int):
        super().__init__(world)
        self.best: list[list[int]] = world.best[:, :count].tolist()

    def choose(self, prompt, named, resident):
        return self.best[prompt]


class _Auto(_Router):
    """The product's: nearest policies, then the bandit, which learns from every reward."""

    def __init__(
        self,
        world: World,
        index: RouteIndex,
        config: Any,
        cost: float,
        rng: np.random.Generator,
    ):
        super().__init__(world)
        self.bandit, self.rng, self.load_s = Bandit(cost), rng, config.load_s
        self.number: dict[Any, int] = {name: i for i, name in enumerate(world.policies)}
        self.near: list[list[Near]] = [index.nearest(v, CANDIDATES) for v in world.vectors]
        self.drawn: tuple[Any, np.ndarray] | None = None

    def choose(self, prompt, named, resident):
        arms = [Arm(BASE, None, 0.0)]
        for key, cosine in self.near[prompt]:
            eta_s = 0.0 if resident(self.number.get(key, -1)) else self.load_s
            arms.append(Arm(key, cosine, eta_s))
        options = self.bandit.options(arms)
        option = self.bandit.draw(options, self.rng.random())
        self.drawn = option.arm.key, self.bandit.features(arms)[options.index(option)]
        if option.arm.key == BASE:
            return []
        return [self.number.get(option.arm.key, -1)]

    def reward(self, reward):
        assert self.drawn is not None
        self.bandit.learn(*self.drawn, reward)


def _routers(
    config: Any, world: World, routers: Mapping[str, Callable[[np.random.Generator], _Router]]
) -> dict[str, Any]:
    """Returns reward, its share of the named policies' reward, and loads, by router."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in routers}
    progress = Progress("routing", config.n * len(routers))
    for seed, (name, make) in itertools.product(range(config.n), routers.items()):
        rng = np.random.default_rng([config.seed, 1, seed])
        found[name].append(_traffic(config, world, make(rng), seed))
        progress.update(sum(map(len, found.values())), name)
    named = [one["reward"] for one in found["named"]]
    out = {}
    for name, runs in found.items():
        columns = {key: [one[key] for one in runs] for key in runs[0]}
        columns["share"] = [one["reward"] / best for one, best in zip(runs, named)]
        out[name] = {key: timing.mean(values) for key, values in columns.items()}
    return out


def _traffic(config: Any, world: World, router: _Router, seed: int) -> dict[str, float]:
    """Returns the mean reward of requests and the loads per 1,000 of them: of all, and of the last
    half alone, ``late``.
    """
    rng = np.random.default_rng([config.seed, 2, seed])
    weights = 1.0 / np.arange(1, len(world.policies) + 1) ** config.zipf
    order = rng.permutation(len(world.policies))
    chances = weights / weights.sum()
    named: list[int] = order[rng.choice(len(order), config.requests, p=chances)].tolist()
    prompts_of = {
        name: [i for i, one in enumerate(world.languages) if one == name.partition("-")[0]]
        for name in world.policies
    }
    tier = Tier(config.slots, clock=itertools.count().__next__)
    rewards, loads = [], []
    for own in named:
        prompt = int(rng.choice(prompts_of[world.policies[own]]))
        chosen = router.choose(prompt, own, lambda i: str(i) in tier)
        row = chosen[0] if chosen else len(world.policies)
        if row == -1:  # of another language
            row = int(rng.integers(len(world.policies)))
            while world.policies[row].partition("-")[0] == world.languages[prompt]:
                row = int(rng.integers(len(world.policies)))
        found = world.composed[prompt] if len(chosen) > 1 else world.rewards[row, prompt]
        rewards.append(float(found))
        router.reward(rewards[-1])
        loads.append(sum(not _use(tier, str(one)) for one in chosen))
    half = config.requests // 2
    return {
        "reward": float(np.mean(rewards)),
        "late_reward": float(np.mean(rewards[half:])),
        "loads": 1e3 * float(np.mean(loads)),
        "late_loads": 1e3 * float(np.mean(loads[half:])),
    }


def _use(tier: Tier, key: str) -> bool:
    """Returns whether it was there; it is then."""
    was = tier.lease(key) is not None
    if not was:
        tier.reserve(key, 1)
        tier.confirm(key, 1.0)
    tier.release(key)
    return was


def _unseen(config: Any, world: World, index: RouteIndex) -> dict[str, Any]:
    """Returns what prompts of languages that no policy knows get, after as many rewards."""
    rng = np.random.default_rng([config.seed, 3])
    router = _Auto(world, index, config, 0.0, rng)
    prompts = [i for i, one in enumerate(world.languages) if one in config.unseen]
    rewards, to_base = [], []
    for _ in range(config.requests // 4):
        prompt = int(rng.choice(prompts))
        chosen = router.choose(prompt, 0, lambda i: True)
        rewards.append(float(world.rewards[max(0, chosen[0]) if chosen else -1, prompt]))
        router.reward(rewards[-1])
        to_base.append(not chosen)
    half = len(rewards) // 2
    return {
        "auto": float(np.mean(rewards[half:])),
        "base": float(world.rewards[-1, prompts].mean()),
        "best": float(world.rewards[:, prompts].max(0).mean()),
        "nearest": float(world.rewards[world.best[prompts, 0], prompts].mean()),
        "composed": float(world.composed[prompts].mean()),
        "to_base": float(np.mean(to_base[half:])),
    }


# -- time


def _decisions(config: Any, prompts: np.ndarray, count: int) -> dict[str, Any]:
    """Returns percentiles of the time of one decision among ``count`` policies, without making the
    prompt's vector, one of ``prompts``.
    """
    rng, dims = np.random.default_rng([config.seed, 4]), prompts.shape[1]
    index, vectors = RouteIndex(dims), np.empty((count, dims), np.float16)
    for first in range(0, count, 1 << 16):
        some = vectors[first : first + (1 << 16)]
        some[:] = _between(prompts, len(some), rng)
    index.put(range(count), vectors)
    bandit, times = Bandit(), []
    for vector in prompts[rng.integers(len(prompts), size=config.decisions)]:
        began = time.perf_counter()
        arms = [
            Arm(BASE, None, 0.0),
            *(Arm(*one, 0.0) for one in index.nearest(vector, CANDIDATES)),
        ]
        option = bandit.draw(options := bandit.options(arms), rng.random())
        features = bandit.features(arms)[options.index(option)]
        times.append(time.perf_counter() - began)
        bandit.learn(option.arm.key, features, rng.random())
    return timing.percentiles(times)


# -- output


def _show(report: dict[str, Any]) -> None:
    columns = "share", "reward", "late_reward", "loads", "late_loads"
    cells = [[name, *(one[c]["mean"] for c in columns)] for name, one in report["routers"].items()]
    report_lib.table("routers", ("router", *columns), cells)
    report_lib.table("prompts of no policy", ("what", "reward"), [*report["unseen"].items()])


def _draw(report: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6.4, 3.8))
    points = [
        (one["late_loads"]["mean"], one["late_reward"]["mean"], name)
        for name, one in report["routers"].items()
    ]
    for number, (x, y, name) in enumerate(sorted(points)):  # names above and below in turn
        ax.plot(x, y, "o")
        place = (0, 7 if number % 2 else -14)
        ax.annotate(name, (x, y), fontsize=8, xytext=place, textcoords="offset points", ha="center")
    ax.margins(0.12)
    ax.set(xlabel="loads per 1,000 requests", ylabel="mean reward")
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
