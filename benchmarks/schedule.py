"""Instructions that adapters add to a tile of rows, counted in the TPU compiler's static schedule.
Programs are compiled and not run; no device is needed.
"""

from pathlib import Path
from typing import Any

from mint_jax.aot import schedule
from mint_jax.harness import report
from mint_jax.harness.start import say


def run(config: Any, folder: Path) -> dict[str, Any]:
    """Compiles for every chip and counts; the compiler's dumps stay in the workdir."""
    result = {"bench": "schedule"} | schedule.reports(config.chips, folder / "dumps")
    _show(result)
    return result


def _show(result: dict[str, Any]) -> None:
    rows = [
        (
            name,
            kernel,
            n,
            of["bundles"],
            f"{100 * of['over_base']:.1f}",
            f"{100 * of['lanes_over_base']:.1f}" if kernel == "add" else "-",
        )
        for name, chip in result["chips"].items()
        for kernel in ("add", "backward")
        for n, of in chip[kernel].items()
    ]
    shape = result["shape"]
    title = (
        f"packed LoRA of rank {shape['rank']} on {shape['d_in']} -> {shape['d_out']}, a tile of"
        f" {shape['tile']} rows"
    )
    report.table(
        title,
        ("chip", "kernel", "adapters", "bundles", "over the base's, %", "lanes' floor, %"),
        rows,
    )
    rows = [
        (name, n, of["bundles"], f"{100 * of['over_two']:.1f}")
        for name, chip in result["chips"].items()
        for n, of in chip["one_pass"].items()
    ]
    report.table(
        "base and adapters in one pass",
        ("chip", "adapters", "bundles", "over those of two passes, %"),
        rows,
    )
    say("bundles of the static schedule: no time, and nothing of copies that are waited for")
    for name, chip in result["chips"].items():
        goal = chip["goal"]
        met = "met" if goal["met"] else "not met"
        say(
            f"{name}: at most {100 * goal['over_base']:.0f} % up to {goal['adapters']} adapters is"
            f" {met} ({100 * goal['reached']:.1f} %)"
        )
