"""Adapters named by a path in configs and data files: a PEFT directory, or one of our revisions."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mint_jax import multihost
from mint_jax.catalog import revisions
from mint_jax.errors import UserError
from mint_jax.jobs.common import say
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.outline import peft_tables


def read_adapter(path: str | Path, base: Base) -> tuple[Any, AdapterConfig]:
    """An adapter and its config, checked against the base.

    Raises:
        UserError: nothing there, unreadable or corrupt, or made for another base.
    """
    path = Path(path)
    specs = transformer.abstract(base.cfg)
    if peft.is_peft(path):
        names, shapes = peft_tables(base.cfg)
        adapter, config = peft.read_peft(path, names, shapes)
    elif (path / revisions.FILE).is_file():
        adapter, schema = revisions.RevisionStore(path.parent).get(path.name)
        if schema.base != base.fingerprint:
            raise UserError(
                f"revision {path.name[:12]} was trained on base {schema.base[:12]}, this is {base.fingerprint[:12]} ({base.name}): "
                "load its own base"
            )
        config = schema.config
    else:
        raise UserError(f"adapter {path} is neither a PEFT directory ({peft.CONFIG}) nor a revision ({revisions.FILE}): check the path")
    bound = lora_tree.check_fits(adapter, config, specs, str(path))
    say(f"adapter {path}: rank {config.rank}, {bound} modules bound")
    return adapter, config


def make_resident(paths: Iterable[str | None], base: Base) -> tuple[Stacks, dict[str, Slot]]:
    """Loads every adapter that is named, each once."""
    loaded = {}
    for path in dict.fromkeys(p for p in paths if p):
        adapter, config = read_adapter(path, base)
        loaded[path] = (config, adapter)
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(base.cfg), loaded)
    return multihost.replicate(stacks, base.mesh), slots
