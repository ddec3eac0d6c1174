"""Adapters named in configs and data files: a PEFT directory, or a revision of the catalog."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mint_jax import multihost
from mint_jax.catalog import names as catalog_names
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.errors import UserError
from mint_jax.jobs.catalogs import JobCatalog, Named
from mint_jax.jobs.common import say
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, Slot, Stacks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.outline import peft_tables


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An adapter on the host.

    Attributes:
        digest: of its packed object, also where it came from a PEFT directory.
        revision: the catalog's name of it; None for a PEFT directory.
    """

    adapter: Any
    config: AdapterConfig
    digest: str
    revision: Named | None = None


def read_adapter(name: str | Path, base: Base, catalog: JobCatalog | None = None) -> Loaded:
    """An adapter, checked against the base.

    Args:
        name: a PEFT directory, or ``policy``, ``policy@alias``, ``policy@12``, a digest, each of ``catalog``.

    Raises:
        UserError: nothing there, unreadable or corrupt, or made for another base.
    """
    text = str(name)
    specs = transformer.abstract(base.cfg)
    if is_directory(text):
        names, shapes = peft_tables(base.cfg)
        adapter, config = peft.read_peft(Path(text), names, shapes)
        loaded = Loaded(adapter, config, digest_of(pack(adapter, Schema(base.fingerprint, config))))
    else:
        data, revision = need_catalog(text, catalog).load(text)
        adapter, schema = unpack(data)
        check_base(schema, str(revision), base)
        loaded = Loaded(adapter, schema.config, revision.digest, revision)
    looked_at = loaded.revision is None or loaded.revision.finite  # when it was read, or when the catalog took it in
    bound = lora_tree.check_fits(loaded.adapter, loaded.config, specs, text, finite=not looked_at)
    say(f"adapter {text}: rank {loaded.config.rank}, {bound} modules bound")
    return loaded


def is_directory(text: str) -> bool:
    """Whether it is a PEFT directory's path rather than a revision's name."""
    only_a_name = not text.startswith(("/", ".")) and ("@" in text or catalog_names.is_digest(text))
    return not only_a_name and peft.is_peft(Path(text))


def need_catalog(text: str, catalog: JobCatalog | None) -> JobCatalog:
    """The catalog to look an adapter up in.

    Raises:
        UserError: the config names none.
    """
    if catalog is None:
        raise UserError(
            f"adapter {text} is no PEFT directory ({peft.CONFIG}), and no catalog is given to look it up in: check the path, or set "
            "--config.catalog"
        )
    return catalog


def check_base(schema: Schema, revision: str, base: Base) -> None:
    """Refuses a revision that was trained on another base."""
    if schema.base != base.fingerprint:
        raise UserError(
            f"revision {revision} was trained on base {schema.base[:12]}, this is {base.fingerprint[:12]} ({base.name}): load its own base"
        )


def read_all(names: Iterable[str | None], base: Base, catalog: JobCatalog | None = None) -> dict[str, Loaded]:
    """Every adapter that is named, each read once."""
    return {name: read_adapter(name, base, catalog) for name in dict.fromkeys(n for n in names if n)}


def make_resident(loaded: Mapping[str, Loaded], base: Base) -> tuple[Stacks, dict[str, Slot]]:
    """Stacks that hold these adapters, and which slot each got."""
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(base.cfg), {n: (a.config, a.adapter) for n, a in loaded.items()})
    return multihost.replicate(stacks, base.mesh), slots
