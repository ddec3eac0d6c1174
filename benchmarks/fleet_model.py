"""How many engines a wave of distinct policies needs: a model, from what single engines were
measured to do.

Nothing is run here. A step of decoding with ``distinct`` adapters and a cold load come from
reports, which are read and named; between two measured numbers of adapters the step is interpolated
in proportion to them, and beyond the largest nothing is said. A wave of ``wave`` policies, each
with one stream, is divided evenly. Of every engine's load there are three bounds, and the engines
needed are the most of:

- ``slots``: policies over the most distinct adapters that were measured in a batch;
- ``speed``: the most adapters whose step still takes at most ``1 / tokens_per_s``;
- ``cold``: a stream lasts ``tokens / tokens_per_s`` seconds, then another policy comes, of which
  the share ``cold_rate`` is in no cache. Loads follow one another on an engine, and may take
  ``load_share`` of its time.

Intervals are those of the measured step and load carried through: nothing is known of what lies
outside the model (arrivals in bursts, uneven division, prompts, failures), and engines are counted
as independent. ``cold_rate`` and the stream are the question's, not measured.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import timing
from mint_jax import stamp
from mint_jax.errors import UserError

Curve = list[tuple[int, float]]  # adapters in the batch, seconds of a step


class Inputs(NamedTuple):
    """What was measured; each with its median, and the ends that are best and worst for us."""

    step: Mapping[str, Curve]
    load_s: Mapping[str, float]
    read: Mapping[str, Any]


CASES = ("median", "best", "worst")


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the model; returns its report."""
    inputs = read(Path(config.active_wave), Path(config.cold_load), config.rank)
    cases = {case: engines(config, inputs.step[case], inputs.load_s[case]) for case in CASES}
    n = min(inputs.read["n"])
    figures = {
        name: {
            "median": cases["median"][name],
            "interval": sorted((cases["best"][name], cases["worst"][name])),
            "n": n,
        }
        for name in cases["median"]
    }
    return {
        "bench": "fleet_model",
        "model": (__doc__ or "").split("\n", 1)[0],
        "names": config.names,
        "wave": config.wave,
        "rank": config.rank,
        "tokens_per_s": config.tokens_per_s,
        "tokens": config.tokens,
        "cold_rate": config.cold_rate,
        "load_share": config.load_share,
        **figures,
        "step_s": [
            {"distinct": distinct, "median": seconds} for distinct, seconds in inputs.step["median"]
        ],
        "load_s": inputs.load_s["median"],
        "read": inputs.read,
    }


def engines(config: Any, step: Curve, load_s: float) -> dict[str, int | float]:
    """Engines by each bound, and altogether.

    Raises:
        UserError: an engine is too slow for one stream, or a single stream's loads take more than
            an engine may give them.
    """
    most = step[-1][0]
    held = fastest(step, 1.0 / config.tokens_per_s)
    if held < 1:
        raise UserError(
            f"tokens_per_s is {config.tokens_per_s}, but a step with the fewest adapters that were"
            f" measured takes {step[0][1]:.3g} s: ask for at most {1 / step[0][1]:.3g}"
        )
    loads_per_s = config.wave * config.cold_rate * config.tokens_per_s / config.tokens
    by = {
        "engines_slots": math.ceil(config.wave / most),
        "engines_speed": math.ceil(config.wave / held),
        "engines_cold": math.ceil(loads_per_s * load_s / config.load_share),
    }
    return {
        **by,
        "engines": max(by.values()),
        "adapters_an_engine": held,
        "cold_loads_per_s": float(f"{loads_per_s:.4g}"),
    }


def fastest(step: Curve, limit_s: float) -> int:
    """The most adapters whose step takes at most ``limit_s``, by interpolation between neighbours;
    0 where none does.
    """
    held = 0
    for (low, fast), (high, slow) in zip(step, [*step[1:], step[-1]]):
        if fast > limit_s:
            break
        held = low
        if slow > limit_s:
            held = low + int((high - low) * (limit_s - fast) / (slow - fast))
            break
    return held


def read(active_wave: Path, cold_load: Path, rank: int) -> Inputs:
    """The two inputs, from reports of benches or of sweeps.

    Raises:
        UserError: a report is missing, failed, or has not what the model needs.
    """
    waves, wave_from = _report(active_wave, "active_wave")
    colds, cold_from = _report(cold_load, "cold_staircase or packed_load")
    measured = sorted(_steps(waves, rank).items())
    if not measured:
        raise UserError(
            f"{active_wave} has no step with adapters of rank {rank}: measure one, or set"
            " --config.rank to one that it has"
        )
    load = _load(colds)
    if load is None:
        raise UserError(
            f"{cold_load} has no time of a single cold load: give a report of cold_staircase or"
            " packed_load"
        )
    pick = {
        "median": timing.value,
        "best": lambda figure: figure["interval"][0],
        "worst": lambda figure: figure["interval"][1],
    }
    return Inputs(
        {
            case: _rising([(distinct, of(figure)) for distinct, figure in measured])
            for case, of in pick.items()
        },
        {case: of(load) for case, of in pick.items()},
        {
            "active_wave": wave_from,
            "cold_load": cold_from,
            "n": [load["n"], *(figure["n"] for _, figure in measured)],
        },
    )


def _report(path: Path, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A report, and where it comes from."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: the model reads a report of {what}; run that sweep or bench"
            " first, or name another file"
        )
    report = stamp.load(path)
    at = report.get("stamp") or next(
        (point for point in report.get("points", ()) if "commit" in point), None
    )
    if at is None:
        raise UserError(
            f"{path} says not where it comes from, or all of its points failed: measure it again"
        )
    origin = {
        "report": str(path),
        "commit": at["commit"],
        "date": at["date"],
        "cpu": at["machine"]["cpu"],
    }
    return report, origin | {
        "devices": at["machine"]["devices"],
        "config": report.get("sweep") or report.get("bench"),
    }


def _steps(report: Mapping[str, Any], rank: int) -> dict[int, timing.Figure]:
    """Seconds of a step, by distinct adapters of this rank."""
    if "batches" in report:
        return {b["distinct"]: _step(report, b) for b in report["batches"] if b["rank"] == rank}
    rows = (
        row
        for point in report.get("points", ())
        if point.get("grid") == "decode"
        for row in point["rows"]
    )
    return {
        row["settings"]["distinct"]: row["figures"]["step_s"]
        for row in rows
        if row["settings"]["rank"] == rank
    }


def _step(report: Mapping[str, Any], batch: Mapping[str, Any]) -> timing.Figure:
    """A batch's step; older reports have the seconds of a call and its steps."""
    if "step_s" in batch:
        return batch["step_s"]
    rows = str(batch["rows"])
    call, steps = report["call_seconds"][rows][batch["name"]], report["steps_of_a_call"][rows]
    return {
        "median": call["median"] / steps,
        "interval": [x / steps for x in call["interval"]],
        "n": call["n"],
    }


def _load(report: Mapping[str, Any]) -> timing.Figure | None:
    """Seconds of one cold load."""
    if "load_ms" in report:
        figure = report["load_ms"]
        return {
            "median": figure["median"] / 1e3,
            "interval": [x / 1e3 for x in figure["interval"]],
            "n": figure["n"],
        }
    if "load_s" in report:
        return report["load_s"]
    rows = (row for point in report.get("points", ()) for row in point["rows"])
    return next(
        (
            row["figures"]["last_s"]
            for row in rows
            if (row["settings"].get("kind"), row["settings"].get("count")) == ("distinct", 1)
        ),
        None,
    )


def _rising(points: Sequence[tuple[int, float]]) -> Curve:
    """The curve with each step at least as long as those of fewer adapters, so that noise makes no
    engine faster by more work.
    """
    out: Curve = []
    for distinct, seconds in points:
        out.append((distinct, max(seconds, out[-1][1]) if out else seconds))
    return out
