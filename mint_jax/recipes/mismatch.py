"""A base of the trainer's own, to study how far trainer and sampler may differ."""

import dataclasses
from typing import Any

import jax

from mint_jax.errors import UserError
from mint_jax.harness.start import say
from mint_jax.models import base as base_lib
from mint_jax.models import router
from mint_jax.models.base import DTYPES, Base
from mint_jax.recipes.options import GrpoSettings


def trainer_base(base: Base, config: GrpoSettings) -> Base:
    """Returns the trainer's base: the sampler's, unless the config studies a mismatch of the two.

    ``router_noise`` changes the weights of the trainer's routers. ``trainer_dtype`` and
    ``trainer_quantise`` load a second base, with its memory.

    Raises:
        UserError: noise for a base without experts.
    """
    dtype, quantise = config.trainer_dtype or config.dtype, config.trainer_quantise
    quantise = config.quantise if quantise is None else quantise
    if DTYPES.get(dtype) != base.dtype or quantise != config.quantise:
        how: Any = {"quantise": quantise, "kernels": base.cfg.kernels}
        base = base_lib.load(config.base, base.mesh, dtype, **how)
        size = f"{base.nbytes / 1e6:.0f} MB more"
        say(f"the trainer has a base of its own in {quantise or dtype}: {size}")
    if not (std := config.router_noise):
        return base
    if not base.cfg.routed:
        raise UserError(f"router_noise is {std}, but {base.name} has no experts: set it to 0")
    noisy = router.perturb(base.params, std, jax.random.key(config.seed))
    return dataclasses.replace(base, params=noisy)
