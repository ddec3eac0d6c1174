"""Adapters for other engines: a PEFT directory, encrypted to age keys where a client asks for it,
and links to its files that expire.

A link carries what it opens and until when, signed with a key of the server: who follows it needs
no other right.
"""

import base64
import hmac
import importlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mint_jax import files
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.models import hf
from mint_jax.models.base import Base, public_name
from mint_jax.train.host_state import HostState

LINK_S = 3600.0
SUFFIX = ".age"


def files_of(
    held: HostState, base: Base, specs: Any, recipients: Sequence[str] = ()
) -> dict[str, bytes]:
    """The files of an adapter as PEFT has it, by name; each encrypted where there are recipients.

    Raises:
        UserError: a recipient is no age public key.
    """
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
    """The digest of an adapter's files, by which its folder is named."""
    return blake3_of(
        b"".join(
            blake3_of(name.encode() + b"\0" + data).encode() for name, data in contents.items()
        )
    )


def write(folder: Path, digest: str, contents: Mapping[str, bytes]) -> None:
    """Writes an adapter's files into ``folder / digest``; they are on the disk when this
    returns.
    """
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
            f"age_encryption_recipients has what is no age public key ({reason}): give keys that"
            " begin with age1"
        ) from None
    return pyrage.encrypt(data, keys)


def names(folder: Path, digest: str) -> list[str]:
    """Of the files."""
    return sorted(path.name for path in (folder / digest).iterdir())


def remove(folder: Path, digest: str) -> None:
    shutil.rmtree(folder / digest, ignore_errors=True)


class Links:
    """Makes and follows links.

    Args:
        folder: what they lead into.
        key: of this server, 32 bytes or more.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, key: bytes, clock: Callable[[], float]):
        self.folder, self._key, self._clock = folder, key, clock

    def make(self, digest: str, name: str, seconds: float = LINK_S) -> str:
        """A token that opens one file."""
        told = json.dumps([digest, name, self._clock() + seconds]).encode()
        return base64.urlsafe_b64encode(self._sign(told) + told).decode().rstrip("=")

    def follow(self, token: str) -> Path:
        """The file.

        Raises:
            UserError: the token is not of this server, or its time is over.
        """
        try:
            data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except ValueError:
            data = b""
        signature, told = data[:32], data[32:]
        if not told or not hmac.compare_digest(signature, self._sign(told)):
            raise UserError("this link is none of this server: ask for new ones")
        digest, name, until = json.loads(told)
        if until < self._clock():
            raise UserError("this link has expired: ask for new ones")
        return self.folder / digest / name

    def _sign(self, told: bytes) -> bytes:
        return hmac.digest(self._key, told, "sha256")


def key_of(path: Path) -> bytes:
    """The key in a file, which is made where there is none."""
    if not path.exists():
        files.write_file(path, secrets.token_bytes(32))
        path.chmod(0o600)
    return path.read_bytes()
