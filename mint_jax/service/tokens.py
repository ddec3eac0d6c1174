"""Short-lived tokens for API keys: Tinker's SDKs exchange the key that they were given for one, and
renew it before it ends.

A token is a JSON Web Token (RFC 7519) that names a key by its id, signed with HMAC and SHA-256
(``HS256``). It says nothing of what its key may do: that is looked up with every request, so that a
token ends with its key. What signs them is 32 random bytes in a file beside the keys, so that
tokens outlive a restart; where the server has no keys, they are of this process, and nobody reads
them.
"""

import base64
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError

FILE = "tokens.secret"
LIFE_S = 3600  # the SDK asks for another 300 s before the end
_HEADER = b'{"alg":"HS256","typ":"JWT"}'
MOST = 1024  # characters of a token that is looked at


class Tokens:
    """Signs and reads tokens.

    Args:
        folder: of the keys; None where there are none.
        clock: seconds since 1970.

    Raises:
        UserError: the file of what signs cannot be read or made, or others may read it.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time):
        self._secret, self._clock = (
            (secrets.token_bytes(32) if folder is None else _kept(folder / FILE)),
            clock,
        )

    def make(self, key: str) -> str:
        """A token for the key with this id, good for ``LIFE_S`` seconds."""
        now = int(self._clock())
        told = {"sub": key, "iat": now, "exp": now + LIFE_S}
        signed = b".".join(
            map(_encode, (_HEADER, json.dumps(told, separators=(",", ":")).encode()))
        )
        return b".".join((signed, _encode(self._sign(signed)))).decode()

    def key_of(self, token: str) -> str | None:
        """The id of the key that a token is for; None where it was not signed here, or its time is
        over.
        """
        signed, _, signature = token[: MOST + 1].encode().rpartition(b".")
        if len(token) > MOST or not hmac.compare_digest(_encode(self._sign(signed)), signature):
            return None
        told = json.loads(_decode(signed.partition(b".")[2]))
        return told["sub"] if self._clock() < told["exp"] else None

    def _sign(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, hashlib.sha256)


def is_token(secret: str) -> bool:
    """Whether what a client shows is a token: a key has no full stops."""
    return secret.count(".") == 2


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _decode(data: bytes) -> Any:
    return base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4))


def _kept(path: Path) -> bytes:
    """What signs, which is made where it is not there; it appears whole, and a second server that
    makes it too has the first one's.
    """
    try:
        if not path.exists():
            made = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
            handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(handle, secrets.token_bytes(32))
                os.fsync(handle)
                os.link(made, path)
            except FileExistsError:
                pass
            finally:
                os.close(handle)
                made.unlink()
        if path.stat().st_mode & 0o077:
            raise UserError(
                f"{path} may be read or written by others (mode {path.stat().st_mode & 0o777:o}):"
                f" chmod 600 {path}"
            )
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read or made ({error.strerror}): let the server's user write in its"
            " folder"
        ) from error
    if len(data) != 32:
        raise UserError(
            f"{path} has {len(data)} bytes; expected 32: delete it, and clients ask for new tokens"
        )
    return data
