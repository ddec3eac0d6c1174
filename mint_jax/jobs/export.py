"""A revision as a PEFT adapter directory, for engines that read those."""

from pathlib import Path
from typing import Any

from mint_jax.jobs import adapters, common
from mint_jax.jobs.common import Config
from mint_jax.lora import peft
from mint_jax.models.outline import peft_tables


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Writes ``config.revision`` (a revision's folder) to ``config.output``; returns the result it prints."""
    common.save_config(config, workdir)
    base = common.open_base(config)
    adapter, adapter_config = adapters.read_adapter(config.revision, base)
    names, _ = peft_tables(base.cfg)
    peft.write_peft(config.output, adapter, adapter_config, names, config.base)
    common.say(f"wrote {config.output}: load it with peft.PeftModel.from_pretrained(base, {config.output!r})")
    return {"job": "export", "revision": Path(config.revision).name, "output": config.output}
