"""A PEFT adapter directory as a revision of a policy."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from mint_jax.catalog.packed import Schema, pack
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, common, settings
from mint_jax.jobs.catalogs import JobCatalog
from mint_jax.jobs.common import Config
from mint_jax.jobs.settings import Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.WithCatalog):
    """What the job has.

    Attributes:
        input: the PEFT adapter's folder.
        policy: whose revision it becomes, NAME or TENANT/NAME.
    """

    input: Place = ""
    policy: str = ""


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Exports the adapter at ``config.input`` to ``config.catalog`` as policy ``config.policy``; returns the result it prints.

    Raises:
        UserError: no policy is named, the adapter does not fit the base, or the policy has another schema.
    """
    common.save_config(config, workdir)
    if not config.policy:
        raise UserError("policy is empty: name the policy that the adapter belongs to, --config.policy=NAME")
    base = common.open_base(config)
    loaded = adapters.read_adapter(config.input, base)
    place = config.catalog or workdir / "catalog"
    data = pack(loaded.adapter, Schema(base.fingerprint, loaded.config))
    with contextlib.closing(JobCatalog(place, config.get("payloads", ""), create=True)) as catalog:
        made = catalog.main.export(config.policy, data, 0, origin=f"import of {config.input}", create=True)
    name = f"{made.policy}@{made.number}"
    common.say(f"imported {config.input} as {name}")
    return {"job": "import", "revision": made.digest, "name": name, "catalog": str(place)}
