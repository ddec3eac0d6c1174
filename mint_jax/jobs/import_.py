"""A PEFT adapter directory as a revision."""

from pathlib import Path
from typing import Any

from mint_jax.catalog.revisions import RevisionStore, Schema, pack
from mint_jax.jobs import adapters, common
from mint_jax.jobs.common import Config


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Stores the adapter at ``config.input`` under ``config.revisions``; returns the result it prints."""
    common.save_config(config, workdir)
    base = common.open_base(config)
    adapter, adapter_config = adapters.read_adapter(config.input, base)
    store = RevisionStore(config.revisions or workdir / "revisions")
    digest = store.put(pack(adapter, Schema(base.fingerprint, adapter_config)))
    return {"job": "import", "revision": digest, "path": str(store.root / digest)}
