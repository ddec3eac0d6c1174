"""Adapters for other engines: a PEFT directory, encrypted to age keys on request, and signed links
to its files that expire.

A link is a JSON Web Token that names its file; whoever has it needs no key.
"""

import importlib
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jwt

from mint_jax import files
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.models import hf
from mint_jax.models.base import Base, public_name
from mint_jax.service.tokens import OPTIONS
from mint_jax.train.host_state import HostState

LINK_S = 3600.0
SUFFIX = ".age"


def files_of(
    held: HostState, base: Base, specs: Any, recipients: Sequence[str] = ()
) -> dict[str, bytes]:
    """Returns an adapter's files in PEFT's format by name, encrypted to age public keys if any."""
    with tempfile.TemporaryDirectory() as made:
        paths = list(lora_tree.projections(specs, held.config.targets))
        name, plain = public_name(base.name), Path(made) / "plain"
        peft.write_peft(
            plain,
            held.adapter(),
            held.config,
            hf.module_names(base.cfg, paths),
            name,
            hf.is_moe_type(base.cfg),
        )
        contents = {path.name: path.read_bytes() for path in sorted(plain.iterdir())}
    return (
        {name + SUFFIX: _encrypted(data, recipients) for name, data in contents.items()}
        if recipients
        else contents
    )


def digest_of(contents: Mapping[str, bytes]) -> str:
    """Returns the digest of an adapter's files, the name of its folder."""
    digests = [blake3_of(name.encode() + b"\0" + data) for name, data in contents.items()]
    return blake3_of("".join(digests).encode())


def write(folder: Path, digest: str, contents: Mapping[str, bytes]) -> None:
    """Writes an adapter's files durably into ``folder / digest``."""
    if (folder / digest).exists():
        return
    with files.new_directory(folder / digest, proof=next(iter(contents))) as new:
        for name, data in contents.items():
            files.write_file(new / name, data)
    files.sync_folder(folder)


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


def names(folder: Path, digest: str) -> list[str]:
    """Returns the names of an adapter's files."""
    return sorted(path.name for path in (folder / digest).iterdir())


class Links:
    """Makes and follows links to files of a folder, signed with the server's key."""

    def __init__(self, folder: Path, key: bytes, clock: Callable[[], float]):
        self.folder, self._key, self._clock = folder, key, clock

    def make(self, digest: str, name: str, seconds: float = LINK_S) -> str:
        """Returns a token that opens one file."""
        claims = {"file": [digest, name], "exp": self._clock() + seconds}
        return jwt.encode(claims, self._key, "HS256")

    def follow(self, token: str) -> Path:
        """Returns the file of a token. Raises ``UserError`` if it is not valid here, or has
        expired.
        """
        try:
            claims = jwt.decode(token, self._key, ["HS256"], options=OPTIONS)  # type: ignore[arg-type]
        except (jwt.PyJWTError, ValueError):
            claims = {}
        if "file" not in claims:
            raise UserError("this link is not from this server: request new ones")
        if claims["exp"] < self._clock():
            raise UserError("this link has expired: request new ones")
        digest, name = claims["file"]
        return self.folder / digest / name


def key_of(path: Path) -> bytes:
    """Returns the key in a file, which is made if missing."""
    if not path.exists():
        files.write_file(path, secrets.token_bytes(32))
        path.chmod(0o600)
    return path.read_bytes()
