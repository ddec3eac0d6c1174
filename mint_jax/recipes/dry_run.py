"""``launch --dry_run``: the program and the bytes of a config, from the config and the base's
``config.json``. Nothing is loaded or written.
"""

from pathlib import Path
from typing import Any

import jax

from mint_jax import mesh, params, trackers
from mint_jax.harness import workdir
from mint_jax.harness.options import BaseSettings, RecipeSettings, TrainingSettings
from mint_jax.lora import tree as lora_tree
from mint_jax.models import hf, layout, names, stored, transformer
from mint_jax.models.base import DTYPES
from mint_jax.recipes import reference
from mint_jax.train import state as state_lib


def describe(config: RecipeSettings, folder: Path) -> dict[str, Any]:
    """Returns ``runs``, ``workdir``, ``config`` and, for recipes over a base, ``bytes``: of the
    base and of policies in training on all devices; of a checkpoint and of each policy's revision
    on disk. Activations and the sampler's cache depend on the lengths of texts, and are not
    included. Raises ``UserError`` where settings do not fit each other, or the base.
    """
    out: dict[str, Any] = {
        "runs": f"mint_jax.{config.folder}.{config.job}: {reference.summary(config.job)}",
        "workdir": str(folder),
        "config": workdir.to_json(config),
    }
    if isinstance(config, TrainingSettings):
        trackers.check(config.trackers)
    if not isinstance(config, BaseSettings):
        return out
    mesh.make_mesh(vars(config.mesh))
    if (directory := names.local(config.base)) is None:
        why = f"base {config.base} is not on this machine yet; the job fetches it"
        return out | {"bytes": None, "why": why}
    cfg, dtype = layout.read_model(directory), DTYPES[config.dtype]
    quantise = config.quantise
    refused = stored.reason_against(dtype, quantise, jax.devices(), config.kernels.layer_matmul)
    as_stored = config.as_stored and not refused and not layout.is_converted(directory)
    base, *_ = hf.resident_specs(directory, cfg, dtype, quantise, as_stored)
    sizes: dict[str, Any] = {"devices": {"base": params.nbytes(base)}, "disk": {}}
    if isinstance(config, TrainingSettings):
        specs = transformer.abstract(cfg)
        adapters = {name: policy.adapter for name, policy in config.policies.items()}
        empty = jax.eval_shape(lambda: state_lib.empty(specs, list(adapters.values())))
        sizes["devices"]["policies_in_training"] = params.nbytes(empty)
        revisions = {name: lora_tree.adapter_nbytes(specs, one) for name, one in adapters.items()}
        sizes["disk"] = {"checkpoint": params.nbytes(empty), "revision": revisions}
    return out | {"bytes": sizes}
