"""Merges of policies that each write the date in one language: the mean loss over all languages by
the number k of members, and whether L* + A / (k + b), fitted to few members, predicts many.

A policy of each language and one of all, ``joint``, are trained side by side, with as many updates
and rows each. Members are drawn at random; a merge is a revision that ``Catalog.merge`` makes. A
loss is the mean over the target tokens of held-out dates, nats, of one language; then the mean over
languages. ``own``: of each language by its own policy, which needs to know the language.
"""

import datetime
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from babel import Locale
from babel.dates import format_date
from scipy.optimize import least_squares

from benchmarks import timing
from benchmarks.bases import open_base
from mint_jax.api import store as store_lib
from mint_jax.api.inputs import Rows
from mint_jax.api.model import Model
from mint_jax.harness import report as report_lib
from mint_jax.harness.adapters import AdapterSource
from mint_jax.lora.merge import MergeConfig
from mint_jax.metrics import Progress
from mint_jax.residency.pool import AdapterBatch, Pool
from mint_jax.rollout.score import Scorer

BASE, JOINT = "base", "joint"


class Merge(NamedTuple):
    """A merge that the bench makes: the way, its members and the factor of each delta."""

    way: str
    members: tuple[str, ...]
    weight: float
    how: MergeConfig


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    rng, base = np.random.default_rng(config.seed), open_base(config)
    languages = list(config.languages)
    with tempfile.TemporaryDirectory() as place, store_lib.open(place, create=True) as store:
        with Model(base, config.seed) as model:
            _train(config, model, rng, store)
        merges = _merges(config, languages, rng)
        adapters: dict[str, str | None] = {BASE: None}
        adapters |= {name: store[f"{name}@latest"].digest for name in (*languages, JOINT)}
        errors = {}
        for number, merge in enumerate(timing.counted("merging", merges)):
            members = [f"{name}@latest" for name in merge.members]
            weights = [merge.weight] * len(members)
            made = store.catalog.merge(f"merge {number}", members, weights, merge.how)
            adapters[made.policy] = made.digest
            errors[made.policy] = (made.merge or {})["relative_error"]
        losses = _losses(config, base, store, adapters)
    rows = [
        {"way": merge.way, "k": len(merge.members), "members": list(merge.members)}
        | {"loss": _short(losses[name]), "omitted": round(errors[name], 4)}
        | {"own": _short([losses[name][languages.index(m)] for m in merge.members])}
        for name, merge in zip(errors, merges)
    ]
    own = [losses[name][at] for at, name in enumerate(languages)]
    report: dict[str, Any] = {"languages": len(languages), "fit": list(config.fit)}
    report |= {name: config[name] for name in ("steps", "rank")}
    report["losses"] = {
        "base": timing.mean(losses[BASE]),
        "joint": timing.mean(losses[JOINT]),
        "own": timing.mean(own),
    }
    sizes = dict.fromkeys(row["k"] for row in rows)
    for way in dict.fromkeys(row["way"] for row in rows):
        found = {k: [r["loss"] for r in rows if (r["way"], r["k"]) == (way, k)] for k in sizes}
        report["losses"] |= {f"{way} {k}": timing.mean(some) for k, some in found.items() if some}
    average = {k: [r["loss"] for r in rows if (r["way"], r["k"]) == ("average", k)] for k in sizes}
    report["curve"] = _curve(config, {int(k): some for k, some in average.items()})
    _show(report)
    _draw(report, rows, workdir / "merges.png")
    return report | {"rows": rows}


def _short(losses: Any) -> float:
    return round(float(np.mean(losses)), 4)


# -- policies and merges


def date_rows(
    config: Any, locale: str, rng: np.random.Generator, count: int
) -> list[dict[str, str]]:
    """Returns random dates in a language, after a prompt that names it."""
    first, language = datetime.date(config.year, 1, 1), Locale(locale).english_name
    out = []
    for day in rng.integers(config.days, size=count).tolist():
        date = first + datetime.timedelta(days=day)
        text = " ".join(format_date(date, "full", locale=locale).split())
        out.append({"prompt": f"{date} in {language}:", "completion": f" {text}\n"})
    return out


def _train(config: Any, model: Model, rng: np.random.Generator, store: store_lib.Store) -> None:
    for name in (*config.languages, JOINT):
        model.policy(
            name, config.rank, alpha=config.alpha, learning_rate=config.rate, seed=config.seed
        )
    progress = Progress("training", config.steps)
    for step in range(1, config.steps + 1):
        rows: dict[str, Rows] = {
            name: date_rows(config, name, rng, config.batch) for name in config.languages
        }
        some = rng.choice(list(config.languages), config.batch).tolist()
        rows[JOINT] = [date_rows(config, name, rng, 1)[0] for name in some]
        metrics = model.train_step({**rows})
        losses = [metrics[name]["loss"] for name in config.languages]
        progress.update(step, f"loss {np.mean(losses):.3f}, joint {metrics[JOINT]['loss']:.3f}")
    for policy in model.policies.values():
        policy.save(store)


def _merges(config: Any, languages: Sequence[str], rng: np.random.Generator) -> list[Merge]:
    """Returns averages of random members, and the other ways over the last members of the sizes
    ``compared``.
    """
    out = []
    for k, n in zip(config.sizes, config.draws):
        whole = len(languages) // k  # of a random order: every language is as often a member
        orders = [rng.permutation(languages) for _ in range(-(-n // whole))]
        chosen = [tuple(o[i * k : (i + 1) * k].tolist()) for o in orders for i in range(whole)][:n]
        out += [Merge("average", members, 1 / k, MergeConfig()) for members in chosen]
        if k in config.compared:
            members = chosen[-1]
            for factor in config.factors:
                out.append(Merge(f"sum x {factor:g}", members, factor / k, MergeConfig()))
            cut = MergeConfig(rank=config.rank)
            out.append(Merge("average cut", members, 1 / k, cut))
            for way, density in config.densities.items():
                how = MergeConfig(way, density)
                out.append(Merge(way, members, 1.0 if "ties" in way else 1 / k, how))
    return out


def _losses(
    config: Any, base: Any, store: store_lib.Store, adapters: Mapping[str, str | None]
) -> dict[str, np.ndarray]:
    """Returns the mean loss of every language's held-out dates, `[languages]`, by adapter."""
    rng, tokenizer = np.random.default_rng([config.seed, 1]), base.need_tokenizer()
    texts, starts = [], []
    for name in config.languages:
        for row in date_rows(config, name, rng, config.held_out):
            prompt = tokenizer.encode(row["prompt"])
            texts.append((*prompt, *tokenizer.encode(row["completion"], special=False)))
            starts.append(len(prompt) - 1)
    digests = [digest for digest in adapters.values() for _ in texts]
    found = logprobs(config, base, store, digests, texts * len(adapters))
    out = {}
    for at, name in enumerate(adapters):
        own = found[at * len(texts) : (at + 1) * len(texts)]
        sums = [-values[start:].sum() for values, start in zip(own, starts)]
        counts = [len(values) - start for values, start in zip(own, starts)]
        shape = len(config.languages), config.held_out
        out[name] = np.reshape(sums, shape).sum(1) / np.reshape(counts, shape).sum(1)
    return out


def logprobs(
    config: Any,
    base: Any,
    store: store_lib.Store,
    digests: Sequence[str | None],
    texts: Sequence[Sequence[int]],
) -> list[np.ndarray]:
    """Returns the log-probabilities of each text under its adapter; None is the bare base."""
    names, scorer = [*digests], Scorer(base, config.score_tokens)
    with Pool(base, AdapterSource(base, store.place), names, config.score_slots) as pool:

        def scored(turn: AdapterBatch) -> list[np.ndarray]:
            own = [texts[i] for i in turn.rows]
            return scorer.logprobs(own, [turn.slot(names[i]) for i in turn.rows], turn.stacks)

        return pool.run(scored)


# -- the curve


def _fit(k: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Returns ``L*, A, b`` of least squares with ``b`` above -1."""
    starts = [(loss.min(), loss.max() - loss.min(), b) for b in (-0.5, 0.0, 1.0, 5.0)]
    bounds = [-np.inf, -np.inf, -0.99], [np.inf, np.inf, 1e3]
    fits = [least_squares(lambda x: _at(x, k) - loss, s, bounds=bounds) for s in starts]
    return min(fits, key=lambda fit: fit.cost).x


def _at(curve: np.ndarray, k: Any) -> Any:
    return curve[0] + curve[1] / (k + curve[2])


def _curve(config: Any, losses: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Returns the curve through the mean losses of ``config.fit`` members, and its relative error
    at the other sizes, with intervals over draws of the members (bootstrap).
    """
    rng = np.random.default_rng([config.seed, 2])
    sizes = np.array(config.fit, np.float64)
    curve = _fit(sizes, np.array([np.mean(losses[k]) for k in config.fit]))
    fits = []
    for _ in range(config.resamples):
        drawn = [np.mean(rng.choice(losses[k], len(losses[k]))) for k in config.fit]
        fits.append(_fit(sizes, np.array(drawn)))
    out: dict[str, Any] = dict(zip(("limit", "a", "b"), map(float, curve)))
    for k in (k for k in losses if k not in config.fit):
        measured = np.mean(losses[k])
        errors = [float(_at(one, k) / measured - 1) for one in (curve, *fits)]
        ends = [round(float(x), 4) for x in np.quantile(errors[1:], [0.025, 0.975])]
        out[f"error {k}"] = {"mean": round(errors[0], 4), "interval": ends, "n": len(losses[k])}
    return out


# -- output


def _show(report: dict[str, Any]) -> None:
    cells = [[name, one["mean"], *one["interval"]] for name, one in report["losses"].items()]
    report_lib.table("mean loss, nats a token", ("policy", "loss", "from", "to"), cells)
    errors = {k: v for k, v in report["curve"].items() if isinstance(v, dict)}
    cells = [[name, one["mean"], *one["interval"]] for name, one in errors.items()]
    report_lib.table("prediction / measured - 1", ("members", "error", "from", "to"), cells)


def _draw(report: dict[str, Any], rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6.4, 3.8))
    for number, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        own = [row for row in rows if row["way"] == way]
        mark = "o" if way == "average" else "x"
        ax.plot(
            [r["k"] for r in own], [r["loss"] for r in own], mark, color=f"C{number}", label=way
        )
    most = max(row["k"] for row in rows)
    k = np.linspace(1, most, 200)
    curve = np.array([report["curve"][name] for name in ("limit", "a", "b")])
    fitted = ", ".join(map(str, report["fit"]))
    ax.plot(k, _at(curve, k), color="C0", lw=1, label=f"fitted to k = {fitted}")
    for name in (BASE, JOINT, "own"):
        ax.axhline(report["losses"][name]["mean"], color="0.6", lw=0.8)
        ax.annotate(name, (most, report["losses"][name]["mean"]), fontsize=8, va="bottom")
    ax.set(xlabel="members k", ylabel="mean loss of all languages, nats")
    ax.legend(fontsize=7)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
