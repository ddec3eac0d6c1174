"""Measures tile sizes and writes ``pallas_kernels.tuning``'s tables for the attached accelerator.

For each call the search starts from the present sizes and halves or doubles one number at a time,
while a candidate is faster by the whole interval of its ratio; sizes that do not compile or give
other results are skipped. Tables go to ``<workdir>/tuned/<op>/<device>.json`` and, with ``keep``,
to the cache where programs look for them.
"""

import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import timing
from mint_jax.errors import UserError, choice
from mint_jax.metrics import Progress
from pallas_kernels import cache, dispatch, tuning
from pallas_kernels.calls import Call, calls

# Of the largest entry: sums in another order, and results of bfloat16 that are rounded to a
# neighbour.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
Side = Callable[[], Any]


class Found(NamedTuple):
    """The fastest sizes of one call, under ``key`` of the table; ``rule`` are those before the
    search, ``ratio`` that of the times of both, ``refused`` has other sizes with the reason.
    """

    key: str
    rule: Any
    best: Any
    ratio: timing.Figure | None
    tried: int
    refused: dict[str, str]


def search(
    call: Call, platform: str, args: tuple[Any, ...], n: int, steps: int, least_s: float
) -> Found:
    """Climbs from the sizes that ``call`` has now, ``steps`` at most; calls shorter than
    ``least_s`` seconds are repeated.
    """
    with tuning.noted() as notes:
        first = _compiled(call, args)
    own = [one for one in notes if (one.op, one.platform) == (call.op, platform)]
    if not own:
        raise UserError(f"{call.name} has no sizes to choose: no kernel serves it here")
    key, rule = own[-1].key, own[-1].sizes
    wanted = jax.device_get(first(*args))
    sides, refused, best = {rule: _side(first, args, least_s)}, {}, rule
    for _ in range(steps):
        near = [
            one for one in tuning.neighbours(best) if one not in sides and str(one) not in refused
        ]
        for one in near:
            try:
                with tuning.trying(call.op, one):
                    made = _compiled(call, args)
                _check(jax.device_get(made(*args)), wanted)
                sides[one] = _side(made, args, least_s)
            except Exception as reason:
                # compilers refuse in many ways; only these sizes are affected
                refused[str(one)] = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
        here = [best, *(one for one in near if one in sides)]
        times = timing.in_turn(call.name, {str(one): sides[one] for one in here}, n)
        fastest = min(here, key=lambda one: statistics.median(times[str(one)]))
        if fastest == best or timing.ratio(times, str(best), str(fastest))["interval"][0] <= 1:
            break
        best = fastest
    ratio = None
    if best != rule:
        times = timing.in_turn(call.name, {"rule": sides[rule], "best": sides[best]}, 2 * n)
        ratio = timing.ratio(times, "rule", "best")
        if ratio["interval"][0] <= 1:
            best, ratio = rule, None
    return Found(key, rule, best, ratio, len(sides), refused)


def _compiled(call: Call, args: tuple[Any, ...]) -> Callable[..., Any]:
    # a new function, so that it is traced
    return jax.jit(lambda *args: call.fn(*args)).lower(*args).compile()


def _check(made: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(one, np.float32), np.asarray(other, np.float32)
        most = TOLERANCE.get(str(other.dtype), TOLERANCE["float32"]) * max(
            1e-30, float(np.abs(y[np.isfinite(y)]).max(initial=0))
        )
        if x.shape != y.shape or not np.allclose(x, y, rtol=0, atol=most, equal_nan=True):
            raise ValueError("its results are not those of the sizes that were taken before")


def _side(made: Callable[..., Any], args: tuple[Any, ...], least_s: float) -> Side:
    once = functools.partial(_repeated, made, args)
    seconds = statistics.median(timing.seconds_of(lambda: once(1)) for _ in range(3))
    return functools.partial(once, max(1, round(least_s / seconds)))


def _repeated(made: Callable[..., Any], args: tuple[Any, ...], times: int) -> None:
    for _ in range(times):
        out = made(*args)
    jax.block_until_ready(out)


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    device = jax.local_devices()[0]
    platform = dispatch.platform_here()
    report: dict[str, Any] = {"kind": device.device_kind, "calls": []}
    if platform not in ("tpu", "cuda"):
        why = f"kernels whose sizes can be chosen are of TPUs and GPUs, and this is {platform}"
        return report | {"empty": why}
    chosen = list(_chosen(config, calls(device, platform)))
    rng, progress = np.random.default_rng(config.seed), Progress("tuning", len(chosen))
    for k, call in enumerate(chosen):
        row: dict[str, Any] = {"op": call.op, "shape": list(call.shape)}
        try:
            found = search(
                call, platform, call.arguments(rng), config.n, config.steps, config.least_s
            )
        except UserError as reason:
            row["empty"] = str(reason)
        else:
            row |= {name: getattr(found, name) for name in ("key", "ratio", "tried", "refused")}
            row |= {"rule": tuning.as_dict(found.rule), "best": tuning.as_dict(found.best)}
            keep(found, call.op, device.device_kind, workdir, config.keep)
        report["calls"].append(row)
        progress.update(k + 1, f"{call.name} {row.get('ratio') or row.get('empty') or 'as it was'}")
    return report


def _chosen(config: Any, calls: Iterator[Call]) -> Iterator[Call]:
    by_op: dict[str, list[Call]] = {}
    for call in calls:
        by_op.setdefault(call.op, []).append(call)
    if unknown := sorted(set(config.ops) - set(by_op)):
        raise choice("op", unknown[0], by_op)
    for op in config.ops or by_op:
        yield from by_op[op][: config.shapes or None]


def keep(found: Found, op: str, device: str, workdir: Path, in_cache: bool) -> None:
    """Writes an entry where the best is another one than before; into the cache too, if wanted."""
    if found.ratio is None:
        return
    entry = {
        "config": tuning.as_dict(found.best),
        "rule": tuning.as_dict(found.rule),
        "ratio": found.ratio,
        "jax": jax.__version__,
    }
    folder = op.split()[0]
    for root in (workdir, cache.folder())[: 1 + in_cache]:
        tuning.write(op, device, {found.key: entry}, root / "tuned" / folder)
