"""Table rows and picture of measured programs."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from mint_jax.aot import hlo
from mint_jax.aot.chips import GIB
from mint_jax.aot.measure import Measured


def columns(measured: Sequence[Measured]) -> tuple[str, ...]:
    """Returns the table head: a column per program, and one for the colocated process."""
    return ("each device, one call", *(m.program for m in measured), "colocated")


def rows(measured: Sequence[Measured], together: Measured, margin: float) -> list[tuple[str, ...]]:
    """Returns one line per quantity; a refused program shows dashes."""

    def line(name: str, value: Callable[[Measured], str]) -> tuple[str, ...]:
        return (name, *("-" if m.refused else value(m) for m in measured), "-")

    def memory(name: str, value: Callable[[Measured], str]) -> tuple[str, ...]:
        return (name, *map(value, (*measured, together)))

    def sent(kind: str) -> Callable[[Measured], str]:
        def shown(m: Measured) -> str:
            least = "≥ " if kind in m.least else ""
            return (
                f"{least}{int(m.counts[kind])}: {least}{_number(m.sent[kind] / 1e9)} GB"
                if kind in m.counts
                else "0"
            )

        return shown

    used = [kind for kind in hlo.COLLECTIVES if any(kind in m.counts for m in measured)]
    return [
        memory("fits", lambda m: "yes" if m.fits(margin) else "does not fit"),
        memory("needs, of HBM, GiB", lambda m: f"{_number(m.total / GIB)} / {m.hbm / GIB:.1f}"),
        memory("free HBM, %", lambda m: _number(100 * m.free)),
        memory("arguments, GiB", lambda m: _number(m.arguments / GIB)),
        memory("temporaries, GiB", lambda m: _number(m.temporaries / GIB)),
        line(
            "outputs - aliased, GiB",
            lambda m: f"{_number(m.outputs / GIB)} - {_number(m.aliased / GIB)}",
        ),
        line("TFLOP", lambda m: _number(m.flops / 1e12)),
        line("HBM traffic, at least, GB", lambda m: _number(m.hbm_bytes / 1e9)),
        *(line(kind, sent(kind)) for kind in used),
        line("compute, ms", lambda m: _number(1e3 * m.compute_s)),
        line("memory, ms", lambda m: _number(1e3 * m.memory_s)),
        line("links, ms", lambda m: _number(1e3 * m.links_s)),
        line("bound", lambda m: m.bound),
        line("compiled in, s", lambda m: f"{m.compile_s:.0f}"),
    ]


def _number(value: float) -> str:
    """Formats three digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def picture(title: Sequence[str], measured: Sequence[Measured], path: Path) -> None:
    """Draws each device's bytes against its memory, and each program's three times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    at, labels = range(len(measured)), [m.program for m in measured]
    base = [0.0] * len(measured)
    parts = {
        "arguments": [m.arguments for m in measured],
        "temporaries": [m.temporaries for m in measured],
        "new outputs": [m.outputs - m.aliased for m in measured],
    }
    for (name, values), color in zip(parts.items(), ("C0", "C1", "C2")):
        if any(values):
            left.bar(at, [v / GIB for v in values], bottom=base, label=name, color=color)
            base = [b + v / GIB for b, v in zip(base, values)]
    left.axhline(measured[0].hbm / GIB, color="k", ls="--", lw=1, label="HBM")
    left.set_xticks(at, labels)
    left.set_ylabel("GiB a device")
    left.legend(fontsize=8)
    terms = {
        "compute": [m.compute_s for m in measured],
        "memory": [m.memory_s for m in measured],
        "links": [m.links_s for m in measured],
    }
    for k, (name, values) in enumerate(terms.items()):
        right.bar([x + 0.27 * (k - 1) for x in at], [1e3 * v for v in values], 0.27, label=name)
    right.set_xticks(at, labels)
    if longest := max(max(values) for values in terms.values()):
        right.set_yscale("log")
        right.set_ylim(1e3 * longest / 1e5, 2e3 * longest)
    right.set_ylabel("ms a call at datasheet peaks (estimate)")
    right.legend(fontsize=8)
    # letters in 10 inches
    lines = [part for line in title for part in textwrap.wrap(line, 130)]
    figure.set_figheight(3.2 + 0.2 * len(lines))
    figure.suptitle("\n".join(lines), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
