"""A base without its weights, sufficient to read, check and write its adapters."""

import dataclasses
import functools
import re
from typing import Any

from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.peft import BaseNames
from mint_jax.lora.tree import Projection
from mint_jax.models import base as base_lib
from mint_jax.models import hf, layout, transformer
from mint_jax.models.config import ModelConfig
from mint_jax.models.names import is_random


@dataclasses.dataclass(frozen=True)
class Outline:
    """A base's dimensions and identity; ``fingerprint`` names it in revisions."""

    name: str
    cfg: ModelConfig
    fingerprint: str

    @functools.cached_property
    def specs(self) -> Any:
        return transformer.abstract(self.cfg)

    @functools.cached_property
    def tables(self) -> tuple[BaseNames, dict[str, Projection]]:
        return peft_tables(self.cfg)


def peft_tables(cfg: ModelConfig) -> tuple[BaseNames, dict[str, Projection]]:
    """Returns the module names of every adaptable projection of a base, and the projections."""
    specs = transformer.abstract(cfg)
    projections = lora_tree.projections(specs, lora_tree.target_paths(specs))
    return hf.module_names(cfg, projections), projections


def outline(name: str, fingerprint: str | None = None) -> Outline:
    """Reads a base's outline by the name that ``base.load`` takes: its config and 12 KiB of each
    tensor.

    Args:
        fingerprint: of the weights, if only ``config.json`` is available.
    """
    directory = base_lib.resolve(name)
    cfg = layout.read_model(directory)
    has_weights = layout.is_converted(directory) or any(directory.glob("*.safetensors"))
    if is_random(name) or has_weights:
        try:
            found = base_lib.fingerprint(name, directory)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the weights in {directory} cannot be read ({error}): fetch the checkpoint again"
            ) from None
        if fingerprint is not None and fingerprint != found:
            raise UserError(
                f"base {name!r} has fingerprint {found[:12]}, not {fingerprint[:12]}: it is a"
                " different base"
            )
        return Outline(name, cfg, found)
    if fingerprint is None:
        raise UserError(
            f"base {name!r} has no *.safetensors in {directory} to compute its fingerprint from:"
            " give the fingerprint too"
        )
    if not re.fullmatch("[0-9a-f]{64}", fingerprint):
        raise UserError(
            f"fingerprint {fingerprint[:80]!r} is invalid: expected 64 hex digits, as printed by"
            " `show` for a policy of this base"
        )
    return Outline(name, cfg, fingerprint)
