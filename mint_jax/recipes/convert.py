"""Writes a base once in the layout of a mesh, so that each host of a pod reads its own shards only.

A stopped conversion continues. Other jobs take the output directory as their base.
"""

import time
from pathlib import Path
from typing import Any

from mint_jax.harness import workdir
from mint_jax.metrics import Progress
from mint_jax.models import base as base_lib
from mint_jax.models import hf, layout
from mint_jax.recipes.options import ConvertSettings


def run(config: ConvertSettings, folder: Path) -> dict[str, Any]:
    """Converts ``config.base`` to ``config.output``; returns the result."""
    workdir.save_config(config, folder)
    source, output = base_lib.resolve(config.base), Path(config.output or folder / "base")
    began, progress = time.monotonic(), None

    def report(done: int, total: int) -> None:
        nonlocal progress
        progress = progress or Progress("converting base", total, per=1e6, unit="MB")
        progress.update(done)

    dtype, quantise = base_lib.DTYPES[config.dtype], config.quantise
    cfg, sizes = hf.read_model(source), config.sizes
    nbytes = layout.write(source, output, cfg, sizes, dtype, quantise, report)
    return {
        "job": "convert",
        "base": config.base,
        "output": str(output),
        "mesh": sizes,
        "bytes": nbytes,
        "seconds": round(time.monotonic() - began, 1),
    }
