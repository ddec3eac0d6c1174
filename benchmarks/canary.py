"""Judges of a canary on the same streams: rewards of real revisions, sampled once and drawn again.

The revisions of one GRPO policy, each against the one before, and planted ones against the last
answer held-out prompts; a stream draws an arm, a prompt and one of the arm's rewards for it. All
judges look at every request:

    evidence   the product's, ``mint_jax.catalog.evidence``
    t-test     Welch's for a fixed horizon, looked at all the same
    msprt      mixture sequential probability ratio test with plug-in variances (Johari et al. 2015,
               arXiv:1512.04922, equation 11 for the difference of two means)
    gate       compares the means once, after ``gate`` answers of the candidate
    late gate  the same after the fewest of ``gates`` answers with ``level`` false rollbacks at most
    loose gate the same with the least of ``margins`` that has ``level`` false rollbacks at most
    full       evaluates both revisions before any request, as often as the bank has rewards

A candidate is bad if its mean reward is below its parent's by more than ``margin``. ``bad``: its
answers within ``requests``; after a wrong promotion it answers all.
"""

import functools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks import timing
from mint_jax import nested, recipes
from mint_jax.catalog.evidence import ArmReward, CanaryEvidence
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import pack, unpack
from mint_jax.envs import env as env_lib
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.harness import report as report_lib
from mint_jax.metrics import Progress

PROXY = "canary_proxy"
BACK, FORTH = "rolled back", "promoted"


class Stream(NamedTuple):
    """Requests of one canary: who answers, `[N]` bool, and the reward, `[N]` float64; and rewards
    of an evaluation of both revisions.
    """

    is_candidate: np.ndarray
    reward: np.ndarray
    candidate: np.ndarray
    parent: np.ndarray


class Verdict(NamedTuple):
    """A judge's decision, ``BACK``, ``FORTH`` or empty, and the requests that it took."""

    decision: str
    requests: int


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    banks, parents = _banks(config)
    means = {name: float(bank.mean()) for name, bank in banks.items()}
    good = {name: means[name] >= means[of] - config.margin for name, of in parents.items()}
    judges = _judges(config, banks[parents["A/A"]], banks["A/A"])
    rows, verdicts = [], {}
    progress = Progress("streams", len(parents))
    for number, (name, of) in enumerate(parents.items()):
        pair = banks[of], banks[name]
        streams = [_stream(config, *pair, [1, number, k]) for k in range(config.n)]
        for judge, decide in judges.items():
            found = verdicts[name, judge] = [decide(one) for one in streams]
            row: dict[str, Any] = {"candidate": name, "judge": judge, "good": good[name]}
            for key, decision in (("rolled_back", BACK), ("promoted", FORTH)):
                row[key] = _share([one.decision == decision for one in found])
            row["requests"] = timing.median(one.requests for one in found)
            if not good[name]:
                row["bad"] = timing.mean(_bad(one, at) for one, at in zip(streams, found))
            rows.append(row)
        progress.update(number + 1, name)
    report: dict[str, Any] = {"rewards": {n: timing.mean(b.mean(1)) for n, b in banks.items()}}
    report |= {name: config[name] for name in ("base", "requests", "share", "margin", "level")}
    report["gates"] = {name: one.keywords for name, one in judges.items() if "gate" in name}
    report["candidates"] = {"good": sum(good.values()), "bad": len(good) - sum(good.values())}
    for key, is_good, decision in (
        ("false_rollbacks", True, BACK),
        ("promotions", True, FORTH),
        ("rollbacks", False, BACK),
        ("false_promotions", False, FORTH),
    ):
        names = [name for name in parents if good[name] == is_good]
        report[key] = {
            judge: _share(
                [one.decision == decision for name in names for one in verdicts[name, judge]]
            )
            for judge in judges
            if names
        }
    report["bad_answers"] = {
        judge: {r["candidate"]: r["bad"] for r in rows if r["judge"] == judge and "bad" in r}
        for judge in judges
    }
    _show(rows)
    _draw(rows, workdir / "canary.png")
    return report | {"rows": rows}


# -- rewards of real revisions


def _banks(config: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns rewards `[prompts, samples]` of every revision, and the parent of each candidate: of
    a step the step before, of a planted one the last step.
    """
    with tempfile.TemporaryDirectory() as place:
        _train(config, Path(place))
        with Catalog.open(f"{place}/catalog") as catalog:
            last = catalog.revision("good", "latest")
            data = _with_layer(catalog, last.digest, config.layer_scale)
            layer = catalog.export("good", data, last.step)
        steps = {f"step {k}": f"good@{k}" for k in range(1, last.number + 1)}
        planted = {
            "layer": f"good@{layer.number}",
            "collapse": "collapse@latest",
            "hack": "hack@latest",
        }
        drawn = _evaluate(config, place, steps | planted, config.seed)
        parent = f"step {last.number}"
        again = _evaluate(config, place, {"A/A": steps[parent]}, config.seed + 10**6)
    drawn |= again | {"older": drawn[f"step {config.older}"]}
    parents = dict(zip([*steps][1:], steps)) | dict.fromkeys([*again, "older", *planted], parent)
    return drawn, parents


def _train(config: Any, place: Path) -> None:
    """Trains a good policy, one whose rate is far too high, and one on a proxy of the reward."""
    env_lib.register_environment(PROXY, _proxy)
    shared = {"adapter": {"rank": config.rank, "alpha": config.alpha}, "loss": {"kind": "ppo"}}
    shared |= {"sampling": config.sampling.to_dict()}
    rates = {"good": 1.0, "collapse": config.collapse, "hack": 1.0}
    policies = {
        name: shared
        | {"optimizer": {"learning_rate": config.rate * times, "warmup_steps": 2}}
        | {"env": {"name": PROXY} if name == "hack" else config.env.to_dict()}
        for name, times in rates.items()
    }
    job = {"job": "grpo", "base": config.base, "dtype": config.dtype, "seed": config.seed}
    job |= {"steps": config.steps, "export_every": 1, "policies": policies}
    job |= {"catalog": f"{place}/catalog", "tensorboard": False}
    job |= {"eval": {"examples": 1, "samples": 1}}
    recipes.run(recipes.read(job), place / "grpo")


def _proxy() -> Any:
    """Returns the task with a reward that counts numbers, of which the true one wants one."""
    task = env_lib.make("digit_sum")

    def count(completion: str, _: Example) -> float:
        return min(1.0, len(re.findall(r"\d+", completion)) / 3)

    return ListEnvironment(task.train, task.held_out, count)


def _with_layer(catalog: Catalog, digest: str, scale: float) -> bytes:
    """Returns a revision whose delta of one layer, the middle one, is scaled."""
    adapter, schema = unpack(catalog.load(digest))

    def scaled(path: str, leaf: np.ndarray) -> np.ndarray:
        leaf = np.array(leaf)
        if path.endswith("/b"):
            leaf[len(leaf) // 2] *= scale
        return leaf

    return pack(nested.map_with_path(scaled, adapter), schema)


def _evaluate(config: Any, place: str, names: dict[str, str], seed: int) -> dict[str, np.ndarray]:
    """Returns rewards of held-out prompts `[prompts, samples]`, by name."""
    own = {name: config[name] for name in ("base", "dtype", "examples", "samples", "slots")}
    own |= {"job": "evaluate", "catalog": f"{place}/catalog", "env": config.env.to_dict()}
    own |= {"adapters": names, "seed": seed}
    recipes.run(recipes.read(own), Path(place) / f"evaluate_{seed}")
    with Catalog.open(f"{place}/catalog") as catalog:
        newest = {name: catalog.evaluations(text)[-1] for name, text in names.items()}
    return {name: np.array(one.metrics["rewards"], np.float64) for name, one in newest.items()}


# -- streams and judges


def _stream(config: Any, of: np.ndarray, bank: np.ndarray, seed: list[int]) -> Stream:
    """Draws a canary's requests from the rewards of a parent and a candidate."""
    rng = np.random.default_rng([config.seed, *seed])
    is_candidate = rng.random(config.requests) < config.share

    def drawn(bank: np.ndarray, count: int) -> np.ndarray:
        return bank[rng.integers(len(bank), size=count), rng.integers(bank.shape[1], size=count)]

    candidate, parent = (drawn(one, config.requests) for one in (bank, of))
    evaluated = (drawn(one, one.size) for one in (bank, of))
    return Stream(is_candidate, np.where(is_candidate, candidate, parent), *evaluated)


def _judges(config: Any, of: np.ndarray, same: np.ndarray) -> dict[str, Any]:
    """Returns the judges; two gates are chosen on streams of their own, of one revision twice."""
    tests = [_stream(config, of, same, [0, 0, k]) for k in range(max(config.n, 100))]

    def gate(*settings: tuple[float, int]) -> Any:
        """Returns the first gate with few false rollbacks, else the last."""
        found = [functools.partial(_gate, margin=margin, count=count) for margin, count in settings]
        wrong = [np.mean([one(test).decision == BACK for test in tests]) for one in found]
        good = [one for one, share in zip(found, wrong) if share <= config.level]
        return (*good, found[-1])[0]

    pair = {"margin": config.margin, "level": config.level}
    return {
        "evidence": functools.partial(_evidence, share=config.share, **pair),
        "t-test": functools.partial(_t_test, **pair),
        "msprt": functools.partial(_msprt, tau=config.tau, **pair),
        "gate": gate((config.margin, config.gate)),
        "late gate": gate(*((config.margin, count) for count in config.gates)),
        "loose gate": gate(*((margin, config.gate) for margin in config.margins)),
        "full": functools.partial(_full, margin=config.margin),
    }


def _evidence(stream: Stream, margin: float, level: float, share: float) -> Verdict:
    evidence, propensity = CanaryEvidence(), {True: share, False: 1 - share}
    for number, (arm, reward) in enumerate(zip(stream.is_candidate, stream.reward), 1):
        one = ArmReward(bool(arm), propensity[bool(arm)], float(reward))
        evidence = evidence.after(one, margin)
        if evidence.e_worse >= 1 / level:
            return Verdict(BACK, number)
        if evidence.e_fit >= 1 / level:
            return Verdict(FORTH, number)
    return Verdict("", len(stream.reward))


def _moments(stream: Stream) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns counts, means and variances of the parent and the candidate after every request, each
    `[2, N]`; NaN where an arm has fewer than two answers.
    """
    arms = np.stack([~stream.is_candidate, stream.is_candidate])
    counts = arms.cumsum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (arms * stream.reward).cumsum(1) / counts
        squares = (arms * stream.reward**2).cumsum(1) / counts
        variances = np.maximum(squares - means**2, 0) * counts / (counts - 1)
    return counts, means, variances


def _first(back: np.ndarray, forth: np.ndarray) -> Verdict:
    """Returns the first decision of arrays `[N]`."""
    either = back | forth
    if not either.any():
        return Verdict("", len(either))
    at = int(either.argmax())
    return Verdict(BACK if back[at] else FORTH, at + 1)


def _t_test(stream: Stream, margin: float, level: float) -> Verdict:
    counts, means, variances = _moments(stream)
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = variances / counts
        t = (means[1] - means[0] + margin) / np.sqrt(parts.sum(0))
        freedom = parts.sum(0) ** 2 / (parts**2 / (counts - 1)).sum(0)
        p = np.where(np.isinf(t), t > 0, stats.t.cdf(t, freedom))
        return _first(p < level, p > 1 - level)


def _msprt(stream: Stream, margin: float, level: float, tau: float) -> Verdict:
    counts, means, variances = _moments(stream)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        v, d = (variances / counts).sum(0), means[1] - means[0] + margin
        log = 0.5 * np.log(v / (v + tau**2)) + tau**2 * d**2 / (2 * v * (v + tau**2))
        sure = (log >= -np.log(level)) | ((v == 0) & (d != 0))
        return _first(sure & (d < 0), sure & (d > 0))


def _gate(stream: Stream, margin: float, count: int) -> Verdict:
    _, means, _ = _moments(stream)
    at = int(np.searchsorted(stream.is_candidate.cumsum(), count))
    if at >= len(stream.reward):
        return Verdict("", len(stream.reward))
    return Verdict(FORTH if means[1, at] >= means[0, at] - margin else BACK, at + 1)


def _full(stream: Stream, margin: float) -> Verdict:
    is_fit = stream.candidate.mean() >= stream.parent.mean() - margin
    return Verdict(FORTH if is_fit else BACK, 0)


def _bad(stream: Stream, at: Verdict) -> int:
    """Returns the number of the candidate's answers, all of them after a promotion."""
    after = len(stream.reward) - at.requests if at.decision == FORTH else 0
    return int(stream.is_candidate[: at.requests].sum()) + after


def _share(hits: Sequence[bool]) -> dict[str, Any]:
    """Returns the share of hits with its exact 95 % interval (Clopper and Pearson)."""
    ends = stats.binomtest(sum(hits), len(hits)).proportion_ci(0.95)
    interval = [round(float(end), 4) for end in (ends.low, ends.high)]
    return {"mean": round(sum(hits) / len(hits), 4), "interval": interval, "n": len(hits)}


def _show(rows: list[dict[str, Any]]) -> None:
    cells = [
        [row["candidate"], row["judge"], row["rolled_back"]["mean"], row["promoted"]["mean"]]
        + [row["requests"]["median"], row.get("bad", {}).get("mean", "")]
        for row in rows
    ]
    head = ("candidate", "judge", "rolled back", "promoted", "requests", "bad answers")
    report_lib.table("canaries", head, cells)


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.4))
    judges = list(dict.fromkeys(row["judge"] for row in rows))
    parts = (("rolled_back", True, "share rolled back, not bad"), ("bad", False, "bad answers"))
    for ax, (key, is_good, label) in zip(axes, parts):
        for at, judge in enumerate(judges):
            own = [row for row in rows if (row["judge"], row["good"]) == (judge, is_good)]
            values = [row[key]["mean"] for row in own]
            ax.plot([at] * len(own), values, "_" if is_good else "o", color=f"C{at}", ms=9)
        ax.set_xticks(range(len(judges)), judges, rotation=30, fontsize=8)
        ax.set(ylabel=f"{label}; a mark a candidate")
    axes[0].axhline(0.05, color="0.5", lw=0.8)
    axes[1].set_yscale("symlog", linthresh=1)
    axes[1].set_ylim(bottom=-0.2)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
