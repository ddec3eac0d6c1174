"""A revision as a PEFT adapter directory, for engines that read those."""

import dataclasses
from pathlib import Path
from typing import Any

from mint_jax.jobs import adapters, catalogs, common, settings
from mint_jax.jobs.common import Config
from mint_jax.jobs.settings import Place
from mint_jax.lora import peft
from mint_jax.models import hf
from mint_jax.models.base import public_name
from mint_jax.models.outline import peft_tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.WithCatalog):
    """What the job has.

    Attributes:
        revision: policy@alias, policy@12, a digest, or a PEFT directory.
        output: the folder to be written.
        base_name: what it calls its base; empty: the base's absolute folder, or its name on the hub.
    """

    revision: Place = ""
    output: Place = ""
    base_name: str = ""


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Writes ``config.revision`` of ``config.catalog`` to the folder ``config.output``; returns the result it prints."""
    settings.complete(config)  # a caller other than launch may leave settings out
    common.save_config(config, workdir)
    base = common.open_base(config)
    with catalogs.reading(config) as catalog:
        loaded = adapters.read_adapter(config.revision, base, catalog)
    names, _ = peft_tables(base.cfg)
    base_name = config.base_name or public_name(config.base)
    peft.write_peft(config.output, loaded.adapter, loaded.config, names, base_name, hf.is_moe_type(base.cfg))
    common.say(f"wrote {config.output}: load it with peft.AutoPeftModelForCausalLM.from_pretrained({config.output!r}), on base {base_name}")
    return {"job": "export", "name": config.revision, "revision": loaded.digest, "output": config.output}
