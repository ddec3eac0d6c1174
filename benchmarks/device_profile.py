"""Kernels of one call on a GPU, from JAX's profiler."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

LONGEST = 25  # kernels of a profile


def profile(call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the number of kernels of a call, the milliseconds in which any runs and from the
    first to the last, and the kernels that take longest: name, count, milliseconds.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # otherwise every call of the host is an event of its own
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(call())
        [file] = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    kernels: dict[str, list[float]] = {}
    spans = []
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines]
    for event in (
        event for line in lines if line.name.startswith("Stream") for event in line.events
    ):
        kernels.setdefault(event.name, []).append(event.duration_ns)
        spans.append((event.start_ns, event.start_ns + event.duration_ns))
    if not spans:  # not a GPU
        return {"planes": [plane.name for plane in data.planes]}
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "kernels": len(spans),
        "busy_ms": round(busy / 1e6, 3),
        "span_ms": round((end - min(start for start, _ in spans)) / 1e6, 3),
        "longest": [[name[:80], len(ns), round(sum(ns) / 1e6, 3)] for name, ns in longest],
    }
