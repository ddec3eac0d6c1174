"""Faults of serving adapters, made in the real engine, and the audit of witnessed tokens that finds
them (``mint_jax.audit``).

A GRPO job trains policy ``mine`` on digit sums, one revision an update, and another tenant's
policy. Answers claim the last revision of ``mine``; what draws them is wrong in one way:

    never bound    the bare base, its adapter slot left empty
    base fallback  after an honest answer, the base; tokens count from its first
    stale cache    the named revision, over a prompt's cache that its parent wrote
    alias race     the parent
    wrong alpha    the named revision at twice its scale
    int8 base      the named revision, over the base in 8 bits
    other tenant   the other tenant's policy

``tokens`` until the alarm at 1 / alpha are of the answers that have one, ``found`` is their share
among ``config.n``. ``honest``: runs of ``config.run_tokens`` honest tokens with an alarm, one
process over all of them, and their rounding. ``adjacent``: other revisions of ``mine`` by distance
in updates. ``cost``: auditing one of ``config.each`` answers over serving them all.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.bases import open_base
from mint_jax import audit, recipes
from mint_jax.audit import BETS, Auditor, Evidence, Verdict
from mint_jax.harness import report as report_lib
from mint_jax.harness import start
from mint_jax.harness.adapters import JobCatalog, read_adapter
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import Stacks
from mint_jax.metrics import Progress
from mint_jax.models import transformer
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.witness import BASE, Witness

SIDES = (*BETS, "e")
ROUNDING = audit.MEASURED["float32"]


class Lab:
    """A base, adapters of a catalog in slots, an engine and an auditor of claims of ``named``, the
    last revision of ``mine``; ``older``: the digests of the others, the nearest first.
    """

    def __init__(self, config: Any, catalog: JobCatalog):
        self.config, self.base = config, open_base(config)
        found = [revision.digest for revision in catalog.main.revisions("mine")[::-1]]
        self.named, *self.older = dict.fromkeys(found)  # an update without gradient changes none
        [self.other] = (r.digest for r in catalog.main.revisions("other")[-1:])
        read = {
            d: read_adapter(d, self.base, catalog) for d in (self.named, *self.older, self.other)
        }
        specs = transformer.abstract(self.base.cfg)
        self.stacks, self.slots = lora_tree.stack_adapters(
            specs, {digest: (one.config, one.adapter) for digest, one in read.items()}
        )
        self.against = audit.alternatives_of(catalog, self.named, config.alternatives)
        self.engine = self.engine_of(self.base)
        self.auditor = Auditor(self.base, ROUNDING)
        self._prompts: dict[int, tuple[int, ...]] = {}

    def engine_of(self, base: Any) -> Engine:
        return Engine(base, rows=(self.config.max_rows,))

    def prompt(self, number: int) -> tuple[int, ...]:
        """Returns the tokens of a chat; no two numbers have the same."""
        if number not in self._prompts:
            texts = self.config.prompts
            text = f"Question {number + 1}. {texts[number % len(texts)]}"
            messages = ({"role": "user", "content": text},)
            self._prompts[number] = tuple(start.encode(self.base, messages, {}))
        return self._prompts[number]

    def draw(
        self,
        tenant: str,
        digest: str | None,
        count: int,
        seed: int = 0,
        *,
        engine: Engine | None = None,
        stacks: Stacks | None = None,
    ) -> list[Witness]:
        """Returns answers that claim ``named`` and are drawn by ``digest``, None: the bare base;
        each tenant has a cache of its own.
        """
        slot = self.slots[digest] if digest is not None else None
        requests = [
            Request(
                self.prompt(i),
                slot,
                max_tokens=self.config.tokens,
                temperature=self.config.temperature,
                seed=(self.config.seed + seed + i) % 2**32,
                revision=self.named,
                tenant=tenant,
            )
            for i in range(count)
        ]
        found = (engine or self.engine).generate(requests, stacks or self.stacks)
        if tenant == "stale cache" and seed and not all(done.reused for [done] in found):
            raise RuntimeError("a prompt is not in the cache; expected one of a page at least")
        pairs = zip(requests, found)
        return [Witness.of(request, 0, done, self.base.fingerprint) for request, [done] in pairs]

    def evidence(self, witnesses: Sequence[Witness], alternatives: int = 99) -> list[Evidence]:
        labels = list(self.against)[:alternatives]
        digests = [self.named, *(self.against[label] for label in labels)]
        slots = [self.slots.get(digest) for digest in digests]
        return self.auditor.evidence(witnesses, slots, self.stacks)

    def judge(self, evidence: Sequence[Evidence]) -> Verdict:
        labels = list(self.against)[: len(evidence[0].logq)]
        return audit.judge(self.named, labels, evidence, ROUNDING)


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    with tempfile.TemporaryDirectory() as place:
        _train(config, Path(place))
        catalog = JobCatalog(f"{place}/catalog")
        lab = Lab(config, catalog)
        report: dict[str, Any] = {"base": lab.base.name, "revisions": 1 + len(lab.older)}
        report |= {name: config[name] for name in ("tokens", "temperature", "steps", "run_tokens")}
        report |= {"alpha": audit.ALPHA, "gap": ROUNDING.gap, "rate": ROUNDING.rate}
        report["against"] = [BASE if v == BASE else k for k, v in lab.against.items()]
        report["faults"] = {name: _summary(*found) for name, found in _faults(lab).items()}
        report["adjacent"] = [
            {
                "name": f"{d}",
                "distance": d,
                **_summary([lab.judge([e]) for e in lab.evidence(drawn)]),
            }
            for d, drawn in _adjacent(lab)
        ]
        report["honest"] = _honest(lab)
        report["cost"] = _cost(lab)  # the only times: the machine may be busy until here
        catalog.close()
    _print(report)
    _draw(report["adjacent"], workdir / "witness.png")
    return report


def _train(config: Any, place: Path) -> None:
    """Trains both policies into ``place``'s catalog."""
    how = {
        "adapter": {"rank": config.rank, "alpha": 2.0 * config.rank},
        "loss": config.loss.to_dict(),
    }
    how |= {"optimizer": config.optimizer.to_dict(), "sampling": config.sampling.to_dict()}
    envs = {"mine": "digit_sum", "other": "larger_of_two"}
    job = {name: config[name] for name in ("base", "dtype", "seed", "steps")}
    job |= {"job": "grpo", "eval": {"examples": 1, "samples": 1}, "tensorboard": False}
    job |= {"catalog": str(place / "catalog"), "export_every": 1}
    job["policies"] = {name: how | {"env": {"name": env}} for name, env in envs.items()}
    recipes.run(recipes.read(job), place / "train")


def _faults(lab: Lab) -> dict[str, tuple[list[Verdict], int]]:
    """Returns the verdicts of each fault, and the number of honest tokens before it."""
    n, named, parent = lab.config.n, lab.named, lab.older[0]
    double = {
        rank: dataclasses.replace(stack, scale=2 * stack.scale)
        for rank, stack in lab.stacks.items()
    }
    lab.draw("stale cache", parent, n)  # writes the cache
    drawn = {
        "never bound": lab.draw("never bound", None, n),
        "stale cache": lab.draw("stale cache", named, n, 1),
        "alias race": lab.draw("alias race", parent, n),
        "wrong alpha": lab.draw("wrong alpha", named, n, stacks=double),
        "other tenant": lab.draw("other tenant", lab.other, n),
    }
    small = open_base({**lab.config.to_dict(), "quantise": "int8"})
    drawn["int8 base"] = lab.draw("int8 base", named, n, engine=lab.engine_of(small))
    found = {name: ([lab.judge([e]) for e in lab.evidence(w)], 0) for name, w in drawn.items()}
    pairs = zip(
        *(lab.evidence(lab.draw(t, d, n)) for t, d in (("honest", named), ("fallback", None)))
    )
    found["base fallback"] = [lab.judge(pair) for pair in pairs], lab.config.tokens
    return found


def _adjacent(lab: Lab) -> list[tuple[int, list[Witness]]]:
    """Returns answers of each other revision, by its distance."""
    older = list(enumerate(lab.older, 1))
    return [(d, lab.draw(f"distance {d}", digest, lab.config.n)) for d, digest in older]


def _summary(verdicts: Sequence[Verdict], before: int = 0) -> dict[str, Any]:
    """Tokens until the alarm by bet, ``before`` less; and shares of what explains the tokens."""
    out: dict[str, Any] = {}
    for side in SIDES:
        at = [one.alarms[side] for one in verdicts]
        counts = [count - before for count in at if count is not None and count > before]
        out[side] = {"found": round(len(counts) / len(at), 3)}
        if counts:
            out[side] |= {"tokens": timing.median(counts), "most": max(counts)}
    explained = [one.explains for one in verdicts]
    out["explains"] = {label: explained.count(label) for label in dict.fromkeys(explained)}
    return out


def _honest(lab: Lab) -> dict[str, Any]:
    """Alarms and rounding of honest tokens, with one alternative."""
    config, every = lab.config, []
    block = 4 * config.max_rows
    total = -(-config.honest // (block * config.tokens))
    progress = Progress("honest tokens", total)
    for k in range(total):
        drawn = lab.draw("honest", lab.named, block, 10**6 + k * block)
        every += lab.evidence(drawn, 1)
        progress.update(k + 1)
    cuts = range(0, config.tokens - config.run_tokens + 1, config.run_tokens)
    runs = [
        lab.judge([Evidence(*(x[..., a : a + config.run_tokens] for x in e))])
        for e in every
        for a in cuts
    ]
    whole = lab.judge(every)
    gaps = np.concatenate([e.gaps[0] for e in every])
    return {
        "tokens": len(gaps),
        "runs": len(runs),
        "alarms": {side: sum(one.alarms[side] is not None for one in runs) for side in SIDES},
        "one_process": {side: whole.alarms[side] for side in SIDES},
        "largest_gap": float(f"{gaps.max():.3g}"),
        "beyond_gap": int((gaps > ROUNDING.gap).sum()),
        "drawn_otherwise": int(sum(e.differs.sum() for e in every)),
    }


def _cost(lab: Lab) -> dict[str, Any]:
    """Shares of serving that auditing one of ``each`` answers takes, by number of alternatives."""
    config, calls = lab.config, itertools.count()
    drawn = lab.draw("audited", lab.named, config.audited)
    counts = sorted({0, 1, len(lab.against)})
    sides: dict[str, Any] = {
        f"alternatives_{k}": lambda k=k: lab.evidence(drawn, k) for k in counts
    }
    # a tenant's first answers have no prompt in the cache
    served = config.each * config.audited
    sides["serve"] = lambda: lab.draw(f"cost {next(calls)}", lab.named, served)
    seconds = timing.in_turn("cost", sides, config.cost_n)
    found = {name: timing.ratio(seconds, name, "serve") for name in sides if name != "serve"}
    return {"each": config.each} | found


def _cells(found: dict[str, Any]) -> list[str]:
    """``median / most`` tokens by bet, with the share that was found if it is not all."""
    cells = []
    for side in SIDES:
        one = found[side]
        text = f"{timing.value(one['tokens']):g} / {one['most']}" if "tokens" in one else "-"
        cells.append(text if one["found"] in (0, 1) else f"{text} ({one['found']:.0%})")
    return cells


def _print(report: dict[str, Any]) -> None:
    rows = [[name, *_cells(found)] for name, found in report["faults"].items()]
    rows += [[f"{one['distance']} updates older", *_cells(one)] for one in report["adjacent"]]
    report_lib.table("tokens until the alarm, median / most", ("fault", *SIDES), rows)


def _draw(adjacent: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5.5, 3.4))
    for side in SIDES:
        points = [
            (one["distance"], timing.value(one[side]["tokens"]))
            for one in adjacent
            if one[side]["found"] >= 0.5
        ]
        if points:
            ax.plot(*zip(*points), marker="o", label="mean of the three" if side == "e" else side)
    ax.axhline(32, color="0.5", lw=0.8)
    ax.set(xlabel="updates between the claim and what answered", ylabel="tokens until the alarm")
    ax.set_yscale("log", base=2)
    ax.legend(fontsize=7)
    ax.grid(alpha=0.3)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
