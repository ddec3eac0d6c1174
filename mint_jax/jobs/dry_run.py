"""``launch --dry_run``: what a job would run and take, from its config and the base's
``config.json``; nothing is loaded or written.
"""

import importlib
from pathlib import Path
from typing import Any

import jax

from mint_jax import mesh, trackers
from mint_jax import params as params_lib
from mint_jax.jobs import JOBS, common, preflight
from mint_jax.jobs.common import Config
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import hf, names, stored, transformer
from mint_jax.models.base import DTYPES
from mint_jax.train import state as state_lib


def describe(config: Config, workdir: Path) -> dict[str, Any]:
    """The resolved config, the program, and bytes where the base's dimensions are at hand.

    Returns:
        ``runs``, ``workdir``, ``config`` and, for jobs over a base, ``bytes``: of the base and of
        policies in training on the devices, altogether; of a checkpoint and of each policy's
        revision on the disk. Activations and caches of sampling come on top, and follow from the
        lengths of texts.

    Raises:
        UserError: settings that do not fit each other, or the base.
    """
    module = importlib.import_module(JOBS[config.job])
    about = (module.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    out: dict[str, Any] = {
        "runs": f"{module.__name__}: {about}",
        "workdir": str(workdir),
        "config": common.plain(config),
    }
    if "wandb" in config:
        trackers.check({name: config[name] for name in preflight.TRACKERS})
    if "base" not in config or "quantise" not in config:
        return out
    mesh.make_mesh(dict(config.mesh))
    directory = names.local(config.base)
    if directory is None:
        return out | {
            "bytes": None,
            "why": f"base {config.base} is not on this machine yet; the job fetches it",
        }
    cfg = hf.read_model(directory)
    dtype = DTYPES[config.dtype]
    as_stored = config.as_stored and not stored.why_not(
        dtype, config.quantise, jax.devices(), common.kernels_of(config).layer_matmul
    )
    base = params_lib.nbytes(
        hf.resident_specs(directory, cfg, dtype, config.quantise, as_stored)[0]
    )
    sizes: dict[str, Any] = {"devices": {"base": base}, "disk": {}}
    if "policies" in config:
        specs = transformer.abstract(cfg)
        adapters = {
            name: common.build(AdapterConfig, section.adapter, f"policies.{name}.adapter")
            for name, section in config.policies.items()
        }
        state = params_lib.nbytes(
            jax.eval_shape(lambda: state_lib.empty(specs, list(adapters.values())))
        )
        sizes["devices"]["policies_in_training"] = state
        sizes["disk"]["checkpoint"] = state
        sizes["disk"]["revision"] = {
            name: lora_tree.adapter_nbytes(specs, adapter) for name, adapter in adapters.items()
        }
    return out | {"bytes": sizes}
