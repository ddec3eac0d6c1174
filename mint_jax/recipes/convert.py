"""Writes a base once in the layout of a mesh, so that each host of a pod reads its own shards only.

A stopped conversion continues. Other jobs take the output directory as their base.
"""

import time
from pathlib import Path
from typing import Any

from mint_jax.harness import workdir
from mint_jax.harness.options import ConvertSettings
from mint_jax.harness.start import bytes_progress
from mint_jax.models import base as base_lib
from mint_jax.models import hf, layout


def run(config: ConvertSettings, folder: Path) -> dict[str, Any]:
    """Converts ``config.base`` to ``config.output``; returns the result."""
    workdir.save_config(config, folder)
    source, output = base_lib.resolve(config.base), Path(config.output or folder / "base")
    began, report = time.monotonic(), bytes_progress("converting base")
    how = base_lib.DTYPES[config.dtype], config.quantise, report
    guard = output.with_name(f"{output.name}.lock")  # outside, since the directory is the base
    guard.parent.mkdir(parents=True, exist_ok=True)
    with open(guard, "w") as file:
        workdir.lock(
            file.fileno(),
            lambda: f"another process converts a base to {output}: wait, or choose another output",
        )
        nbytes = layout.write(source, output, hf.read_model(source), config.sizes, *how)
        guard.unlink()
    return {
        "job": "convert",
        "base": config.base,
        "output": str(output),
        "mesh": config.sizes,
        "bytes": nbytes,
        "seconds": round(time.monotonic() - began, 1),
    }
