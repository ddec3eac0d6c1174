"""Tells whether a base with many policies fits a pod, and what bounds a step. Programs are compiled
and not run; no device is needed.

The training step, the optimizer step, prefill of some blocks and one token of decode are compiled
for the named pod from shapes alone. Memory, FLOPs, collectives and a roofline estimate are printed,
drawn and saved, and so is the memory of a process that both trains and samples.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mint_jax import mesh as mesh_lib
from mint_jax import nested
from mint_jax import params as params_lib
from mint_jax.aot import chips
from mint_jax.aot.chips import GIB
from mint_jax.aot.measure import TIMES, Measured, colocated, measure
from mint_jax.aot.programs import Plan
from mint_jax.aot.settings import ScaleUpSettings
from mint_jax.errors import UserError
from mint_jax.harness import report, workdir
from mint_jax.harness.start import say
from mint_jax.lora import tree as lora_tree
from mint_jax.models import transformer
from mint_jax.models.base import DTYPES
from mint_jax.models.hf_config import from_hf
from pallas_kernels import dispatch

NOTE = """\
colocated: base, training state, adapters in sampling and caches resident together,
and the largest temporaries of one program
times are lower bounds: datasheet peaks, memory traffic of arguments and new outputs alone
prefill is a call with the last blocks of prompts, decode the last token of every row"""


def run(config: ScaleUpSettings, folder: Path) -> dict[str, Any]:
    """Compiles for ``config.topology``, or for larger and larger pods of ``config.chip`` until one
    fits.
    """
    fallen, smallest = dispatch.fallen.copy(), config.topology == "smallest"
    workdir.save_config(config, folder)
    tried: dict[str, str] = {}
    for name in chips.names(config.chip) if smallest else [config.topology]:
        target = chips.target(name)
        try:
            plan = plan_of(config, target)
            measured, tried[name] = _compile(config, plan, target, whole=not smallest)
        except UserError as error:  # the mesh does not divide the pod, the base or the rows
            if not smallest:
                raise
            tried[name] = str(error)
        if not tried[name]:
            break
        say(f"{name}: {tried[name]}")
    else:
        reasons = "; ".join(f"{name}: {why}" for name, why in tried.items())
        raise UserError(
            f"no {config.chip} slice holds {config.base}: change --config.mesh, .train or .rollout,"
            f" or another --config.chip. {reasons}"
        )
    together = colocated(measured, plan.base_bytes)
    result = _result(config, plan, target, [*measured, together])
    platform = "cuda" if target.name.startswith("cuda:") else "tpu"
    result["kernels_passed_over"] = dispatch.passed_over(fallen, platform)
    if smallest:
        result["tried"] = tried | {name: "fits"}
    head = _head(config, result)
    shown = [*measured, together]
    columns = ("each device, one call", *(m.program for m in shown))
    report.table("\n".join(head), columns, rows(shown, config.margin))
    say(NOTE)
    for one in result["kernels_passed_over"]:
        say("{op}: {implementation} was passed over {times} times: {reason}".format(**one))
    picture(head, measured, folder / "scale_up.png")
    for m in measured if config.hlo else ():
        (folder / f"{m.program}.hlo.txt").write_text(m.text)
    return result


def plan_of(config: ScaleUpSettings, target: chips.Target) -> Plan:
    """Returns the plan of a pod; raises ``UserError`` if the mesh does not fit it."""
    cfg = from_hf(config.model).replace(kernels=config.kernels)
    mesh = mesh_lib.make_mesh(vars(config.mesh), list(target.devices))
    return Plan(cfg, mesh, DTYPES[config.dtype], config.adapter, config.quantise)


def _compile(
    config: ScaleUpSettings, plan: Plan, target: chips.Target, whole: bool
) -> tuple[list[Measured], str]:
    """Compiles the programs; unless ``whole``, stops where the pod is too small. Returns their
    measurements, and the reason why the pod is too small.
    """
    found, margin = [], config.margin
    if not whole and plan.base_bytes > (1 - margin) * target.hbm:
        return found, (
            f"does not fit: weights alone are {plan.base_bytes / GIB:.1f} of"
            f" {target.hbm / GIB:.1f} GiB a device, of which {100 * margin:.0f} % are to stay free"
        )
    for program in plan.programs(config.train, config.rollout):
        say(f"compiling {program.name} for {target.name} ({target.chips} chips)")
        m = measure(program, plan.mesh, target)
        found.append(m)
        free = f"free HBM {100 * m.free:.1f} %, compiled in {m.compile_s:.0f} s"
        fits = m.fits(margin)
        say(f"{m.program}: fits, {free}" if fits else m.reason(margin))
        if not fits and not whole:
            return found, m.reason(margin)
    return found, ""


def _result(
    config: ScaleUpSettings, plan: Plan, target: chips.Target, measured: Sequence[Measured]
) -> dict[str, Any]:
    # without the scales of 8-bit matrices
    base = params_lib.count(transformer.abstract(plan.cfg))
    one = params_lib.count(lora_tree.adapter_specs(plan.specs, config.adapter))
    adapter = {name: getattr(config.adapter, name) for name in ("rank", "alpha")}
    return {
        "job": "scale_up",
        "model": config.base,
        "topology": target.name,
        "chips": target.chips,
        "devices": len(target.devices),
        "mesh": dict(plan.mesh.shape),
        "hbm_bytes_per_device": target.hbm,
        "quantise": config.quantise,
        "parameters": base,
        "base_bytes_per_device": plan.base_bytes,
        "adapter_parameters": one,
        "adapter_percent_of_base": round(100 * one / base, 4),
        "adapter": adapter | {"targets": list(config.adapter.targets)},
        "policies": config.train.policies,
        "adapters": config.rollout.adapters,
        "fits": int(all(m.fits(config.margin) for m in measured[:-1])),
    } | {m.program: m.json(config.margin) for m in measured}


def _head(config: ScaleUpSettings, result: dict[str, Any]) -> tuple[str, ...]:
    """Returns the title of table and picture."""
    axes = [f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1]
    return (
        f"{config.base}, {result['parameters'] / 1e9:.4g}B parameters,"
        f" {result['base_bytes_per_device'] / GIB:.3g} GiB a device",
        f"{result['topology']}: {result['chips']} chips, {' x '.join(axes) or 'one device'}",
        f"{config.train.policies} policies in training, {config.rollout.adapters} adapters in"
        f" sampling, rank {config.adapter.rank} on {', '.join(config.adapter.targets)},"
        f" {result['adapter_percent_of_base']} % of the base each",
    )


def rows(measured: Sequence[Measured], margin: float) -> list[tuple[Any, ...]]:
    """Returns a row of the table for each quantity, named as in ``result.json``."""
    found = [dict(nested.leaves_with_path(m.json(margin))) for m in measured]
    names = dict.fromkeys(name for each in found for name in each)
    return [(name, *(_shown(each.get(name, "-")) for each in found)) for name in names]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def picture(title: Sequence[str], measured: Sequence[Measured], path: Path) -> None:
    """Draws each device's bytes against its memory, and each program's three times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    at, labels = np.arange(len(measured)), [m.program for m in measured]
    below = np.zeros(len(measured))
    for name, values in {
        "arguments": [m.arguments for m in measured],
        "temporaries": [m.temporaries for m in measured],
        "new outputs": [m.outputs - m.aliased for m in measured],
    }.items():
        left.bar(at, np.divide(values, GIB), bottom=below, label=name)
        below += np.divide(values, GIB)
    left.axhline(measured[0].hbm / GIB, color="k", ls="--", lw=1, label="HBM")
    left.set_xticks(at, labels)
    left.set_ylabel("GiB a device")
    left.legend(fontsize=8)
    times_ms = [[1e3 * m.seconds[name] for m in measured] for name in TIMES]
    for k, (name, values) in enumerate(zip(TIMES, times_ms)):
        right.bar(at + 0.27 * (k - 1), values, 0.27, label=name)
    right.set_xticks(at, labels)
    if longest := np.max(times_ms):
        right.set_yscale("log")
        right.set_ylim(longest / 1e5, 2 * longest)
    right.set_ylabel("ms a call at datasheet peaks (estimate)")
    right.legend(fontsize=8)
    lines = [part for line in title for part in textwrap.wrap(line, 130)]
    figure.set_figheight(3.2 + 0.2 * len(lines))
    figure.suptitle("\n".join(lines), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
