"""Tells whether a base with many policies fits a pod, and what bounds a step. Programs are compiled
and not run; no device is needed.

The training step, the optimizer step, prefill of some blocks and one token of decode are compiled
for the named pod from shapes alone. The compiler's memory figures, FLOPs, collectives and a
roofline estimate are printed, drawn and saved, and so is the memory of a process that both trains
and samples.
"""

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
        self.config, self.train, self.rollout = config, config.train, config.rollout
        self.dtype, self.adapter = DTYPES[config.dtype], config.adapter
        self.cfg = from_hf(config.model).replace(kernels=config.kernels)

    def plan(self, target: chips.Target) -> Plan:
        """Returns the plan of a pod; raises ``UserError`` if the mesh does not fit it."""
        mesh = mesh_lib.make_mesh(vars(self.config.mesh), list(target.devices))
        return Plan(self.cfg, mesh, self.dtype, self.adapter, self.config.quantise)

    def measured(self, plan: Plan, target: chips.Target, whole: bool) -> tuple[list[Measured], str]:
        """Compiles the programs; unless ``whole``, stops where the pod is too small. Returns their
        measurements, and the reason why the pod is too small.
        """
        found, margin = [], self.config.margin
        if not whole and plan.base_bytes > (1 - margin) * target.hbm:
            return found, (
                f"does not fit: weights alone are {plan.base_bytes / GIB:.1f} of"
                f" {target.hbm / GIB:.1f} GiB a device, of which {100 * margin:.0f} % are to stay"
                " free"
            )
        for program in plan.programs(self.train, self.rollout):
            say(f"compiling {program.name} for {target.name} ({target.chips} chips)")
            m = measure(program, plan.mesh, target)
            found.append(m)
            free = f"free HBM {100 * m.free:.1f} %, compiled in {m.compile_s:.0f} s"
            fits = m.fits(margin)
            say(f"{m.program}: fits, {free}" if fits else m.reason(margin))
            if not fits and not whole:
                return found, m.reason(margin)
        return found, ""


def run(config: ScaleUpSettings, folder: Path) -> dict[str, Any]:
    """Compiles for ``config.topology``, or for larger and larger pods of ``config.chip`` until one
    fits.
    """
    fallen, question = dispatch.fallen.copy(), Question(config)
    smallest = config.topology == "smallest"
    workdir.save_config(config, folder)
    tried: dict[str, str] = {}
    for name in chips.names(config.chip) if smallest else [config.topology]:
        target = chips.target(name)
        try:
            plan = question.plan(target)
            measured, tried[name] = question.measured(plan, target, whole=not smallest)
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
    result = _result(question, plan, target, measured)
    platform = "cuda" if target.name.startswith("cuda:") else "tpu"
    result["kernels_passed_over"] = dispatch.passed_over(fallen, platform)
    if smallest:
        result["tried"] = tried | {name: "fits"}
    _show(config, result, measured, folder)
    for m in measured if config.hlo else ():
        (folder / f"{m.program}.hlo.txt").write_text(m.text)
    return result


def _result(
    question: Question, plan: Plan, target: chips.Target, measured: list[Measured]
) -> dict[str, Any]:
    config = question.config
    # without the scales of 8-bit matrices
    base = params_lib.count(transformer.abstract(question.cfg))
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
        "fits": int(all(m.fits(config.margin) for m in measured)),
        "colocated": colocated(measured, plan.base_bytes).json(config.margin),
    } | {m.program: m.json(config.margin) for m in measured}


def _show(
    config: ScaleUpSettings, result: dict[str, Any], measured: list[Measured], folder: Path
) -> None:
    """Prints and draws the result."""
    axes = [f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1]
    head = (
        f"{config.base}, {result['parameters'] / 1e9:.4g}B parameters,"
        f" {result['base_bytes_per_device'] / GIB:.3g} GiB a device",
        f"{result['topology']}: {result['chips']} chips, {' x '.join(axes) or 'one device'}",
        f"{config.train.policies} policies in training, {config.rollout.adapters} adapters in"
        f" sampling, rank {config.adapter.rank} on {', '.join(config.adapter.targets)},"
        f" {result['adapter_percent_of_base']} % of the base each",
    )
    together = colocated(measured, result["base_bytes_per_device"])
    rows = aot_report.rows(measured, together, config.margin)
    report.table("\n".join(head), aot_report.columns(measured), rows)
    say(
        "colocated: base, training state, adapters in sampling and caches resident together, and"
        " the largest temporaries of one program\ntimes are lower bounds: datasheet peaks, memory"
        " traffic of arguments and new outputs alone\nprefill is a call with the last blocks of"
        " prompts, decode the last token of every row"
    )
    for one in result["kernels_passed_over"]:
        say("{op}: {implementation} was passed over {times} times: {reason}".format(**one))
    aot_report.picture(head, measured, folder / "scale_up.png")
