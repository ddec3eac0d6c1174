"""Adapters for other engines: PEFT's files, encrypted to age keys on request, and links to them.

A link is a JSON Web Token that names a file and expires; whoever has it needs no key.
"""

import importlib
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jwt

from mint_jax import files
from mint_jax.errors import UserError
from mint_jax.lora import peft
from mint_jax.models import hf
from mint_jax.models.base import Base, public_name
from mint_jax.models.outline import peft_tables
from mint_jax.service.tokens import OPTIONS
from mint_jax.train.host_state import HostState

LINK_S = 3600.0


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
    return {f"{name}.age": _encrypted(data, recipients) for name, data in contents.items()}


def _encrypted(data: bytes, recipients: Sequence[str]) -> bytes:
    try:
        pyrage: Any = importlib.import_module("pyrage")
    except ImportError:
        raise UserError("encryption needs the package pyrage: install mint-jax[serve]") from None
    try:
        keys = [pyrage.x25519.Recipient.from_str(text) for text in recipients]
    except pyrage.RecipientError as reason:
        raise UserError(
            f"age_encryption_recipients has no age public key ({reason}): give keys that"
            " begin with age1"
        ) from None
    return pyrage.encrypt(data, keys)


class Links:
    """Links to files below a folder, signed with a key in a file that is made if missing."""

    def __init__(self, folder: Path, key: Path, clock: Callable[[], float]):
        self.folder, self._clock = folder, clock
        if not key.exists():
            files.write_file(key, secrets.token_bytes(32))
            key.chmod(0o600)
        self._key = key.read_bytes()

    def make(self, digest: str, name: str) -> str:
        """Returns a token that opens one file for ``LINK_S``."""
        claims = {"file": [digest, name], "exp": self._clock() + LINK_S}
        return jwt.encode(claims, self._key, "HS256")

    def follow(self, token: str) -> Path:
        """Returns the file of a token. Raises ``UserError``: not valid here, or expired."""
        try:
            claims = jwt.decode(token, self._key, ["HS256"], options=OPTIONS)  # type: ignore[arg-type]
        except (jwt.PyJWTError, ValueError):
            raise UserError("this link is not from this server: request new ones") from None
        if claims["exp"] < self._clock():
            raise UserError("this link has expired: request new ones")
        digest, name = claims["file"]
        return self.folder / digest / name
