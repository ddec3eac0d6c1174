"""Adapters for other engines: PEFT's files, encrypted to age keys on request."""

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError
from mint_jax.lora import peft
from mint_jax.models import hf
from mint_jax.models.base import Base, public_name
from mint_jax.models.outline import peft_tables
from mint_jax.train.host_state import HostState

pyrage: Any = importlib.import_module("pyrage")  # without types


def files_of(state: HostState, base: Base, recipients: Sequence[str] = ()) -> dict[str, bytes]:
    """Returns an adapter's files in PEFT's format by name, encrypted to age public keys if any."""
    modules, _ = peft_tables(base.cfg)
    name, is_moe = public_name(base.name), hf.is_moe_type(base.cfg)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "plain"
        peft.write_peft(folder, state.adapter(), state.config, modules, name, is_moe)
        contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    if not recipients:
        return contents
    try:
        keys = [pyrage.x25519.Recipient.from_str(text) for text in recipients]
    except pyrage.RecipientError as reason:
        raise UserError(
            f"age_encryption_recipients has no age public key ({reason}): give keys that"
            " begin with age1"
        ) from None
    return {f"{name}.age": pyrage.encrypt(data, keys) for name, data in contents.items()}
