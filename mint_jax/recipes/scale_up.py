"""Tells whether a base with many policies fits a pod, and what bounds a step. Programs are compiled
and not run; no device is needed.

The training step, the optimizer step, prefill of some blocks and one token of decode are compiled
for the named pod from shapes alone. The compiler's memory figures, FLOPs, collectives and a
roofline estimate are printed, drawn and saved, and so is the memory of a process that both trains
and samples.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mint_jax import mesh as mesh_lib
from mint_jax import params as params_lib
from mint_jax.aot import chips
from mint_jax.aot import report as aot_report
from mint_jax.aot.measure import Measured, colocated, measure
from mint_jax.aot.programs import Plan
from mint_jax.errors import UserError
from mint_jax.harness import report, workdir
from mint_jax.harness.start import say
from mint_jax.lora import tree as lora_tree
from mint_jax.models import transformer
from mint_jax.models.base import DTYPES
from mint_jax.models.config import from_hf
from mint_jax.recipes.options import ScaleUpSettings
from pallas_kernels import dispatch

GIB = chips.GIB


class Question:
    """A config with its model, compiled for one pod after another."""

    def __init__(self, config: ScaleUpSettings):
        self.fallen = dispatch.fallen.copy()  # kernels passed over before
        self.name, self.dtype, self.margin = config.base, DTYPES[config.dtype], config.margin
        self.cfg = from_hf(config.model).replace(kernels=config.kernels)
        self.sizes, self.quantise = config.mesh.axes(), config.quantise
        self.adapter, self.train, self.rollout = config.adapter, config.train, config.rollout

    def plan(self, target: chips.Target) -> Plan:
        return Plan(
            self.cfg,
            mesh_lib.make_mesh(self.sizes, list(target.devices)),
            self.dtype,
            self.adapter,
            self.quantise,
        )

    def measured(self, plan: Plan, target: chips.Target) -> Iterator[Measured]:
        """Compiles each program, with a line before and after."""
        for program in plan.programs(self.train, self.rollout):
            say(f"compiling {program.name} for {target.name} ({target.chips} chips)")
            m = measure(program, plan.mesh, target)
            free = f"free HBM {100 * m.free:.1f} %"
            if m.fits(self.margin):
                say(f"{m.program}: fits, {free}, compiled in {m.compile_s:.0f} s")
            else:
                say(m.reason(self.margin))
            yield m


def run(config: ScaleUpSettings, folder: Path) -> dict[str, Any]:
    """Compiles for ``config.topology``, or for larger and larger pods of ``config.chip`` until one
    fits.
    """
    question = Question(config)
    if config.topology == "smallest":
        chips.names(config.chip)
    workdir.save_config(config, folder)
    if config.topology == "smallest":
        target, plan, measured, tried = _smallest(question, config.chip)
    else:
        target, tried = chips.target(config.topology), None
        plan = question.plan(target)
        measured = list(question.measured(plan, target))
    result = _result(question, plan, target, measured)
    if tried is not None:
        result["tried"] = tried
    _show(question, result, measured, folder)
    if config.hlo:
        for m in measured:
            (folder / f"{m.program}.hlo.txt").write_text(m.text)
    return result


def _smallest(
    question: Question, chip: str
) -> tuple[chips.Target, Plan, list[Measured], dict[str, str]]:
    """Returns the first pod whose programs all fit, and why each smaller one does not."""
    tried: dict[str, str] = {}
    for name in chips.names(chip):
        target = chips.target(name)
        try:
            plan = question.plan(target)
            if plan.base_bytes > (1 - question.margin) * target.hbm:
                needs = (
                    f"weights alone are {plan.base_bytes / GIB:.1f} of {target.hbm / GIB:.1f} GiB a"
                    " device"
                )
                tried[name] = (
                    f"does not fit: {needs}, of which {100 * question.margin:.0f} % are to stay"
                    " free"
                )
                say(f"{name}: {tried[name]}")
                continue
            measured = []
            for m in question.measured(plan, target):
                measured.append(m)
                if not m.fits(question.margin):
                    tried[name] = m.reason(question.margin)
                    break
            else:
                return target, plan, measured, tried | {name: "fits"}
        except UserError as error:  # the mesh does not divide the pod, the base or the rows
            tried[name] = str(error)
            say(f"{name}: {error}")
    reasons = "; ".join(f"{name}: {why}" for name, why in tried.items())
    raise UserError(
        f"no {chip} slice holds {question.name}: change --config.mesh, .train or .rollout, or"
        f" another --config.chip. {reasons}"
    )


def _result(
    question: Question, plan: Plan, target: chips.Target, measured: list[Measured]
) -> dict[str, Any]:
    # without the scales of 8-bit matrices
    base = params_lib.count(transformer.abstract(question.cfg))
    one = params_lib.count(lora_tree.adapter_specs(plan.specs, question.adapter))
    return {
        "job": "scale_up",
        "model": question.name,
        "topology": target.name,
        "chips": target.chips,
        "devices": len(target.devices),
        "mesh": dict(plan.mesh.shape),
        "hbm_bytes_per_device": target.hbm,
        "quantise": question.quantise,
        "parameters": base,
        "base_bytes_per_device": plan.base_bytes,
        "adapter_parameters": one,
        "adapter_percent_of_base": round(100 * one / base, 4),
        "adapter": {
            "rank": question.adapter.rank,
            "alpha": question.adapter.alpha,
            "targets": list(question.adapter.targets),
        },
        "policies": question.train.policies,
        "adapters": question.rollout.adapters,
        "fits": int(all(m.fits(question.margin) for m in measured)),
        "colocated": colocated(measured, plan.base_bytes).json(question.margin),
        "kernels_passed_over": dispatch.passed_over(
            question.fallen, "cuda" if target.name.startswith("cuda:") else "tpu"
        ),
    } | {m.program: m.json(question.margin) for m in measured}


def _show(
    question: Question, result: dict[str, Any], measured: list[Measured], folder: Path
) -> None:
    mesh = (
        " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1)
        or "one device"
    )
    base = (
        f"{question.name}, {result['parameters'] / 1e9:.4g}B parameters,"
        f" {result['base_bytes_per_device'] / GIB:.3g} GiB a device"
    )
    pod = f"{result['topology']}: {result['chips']} chips, {mesh}"
    adapters = (
        f"{question.train.policies} policies in training, {question.rollout.adapters} adapters in"
        f" sampling, rank {question.adapter.rank} on {', '.join(question.adapter.targets)},"
        f" {result['adapter_percent_of_base']} % of the base each"
    )
    together = colocated(measured, result["base_bytes_per_device"])
    report.table(
        f"{base}\n{pod}\n{adapters}",
        aot_report.columns(measured),
        aot_report.rows(measured, together, question.margin),
    )
    say(
        "colocated: base, training state, adapters in sampling and caches resident together, and"
        " the largest temporaries of one program"
    )
    say(
        "times are lower bounds: datasheet peaks, memory traffic of arguments and new outputs alone"
    )
    for one in result["kernels_passed_over"]:
        say(
            f"{one['op']}: {one['implementation']} was passed over {one['times']} times:"
            f" {one['reason']}"
        )
    say("prefill is a call with the last blocks of prompts, decode the last token of every row")
    aot_report.picture((base, pod, adapters), measured, folder / "scale_up.png")
