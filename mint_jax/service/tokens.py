"""Short-lived tokens, for which Tinker's SDKs exchange their key: JSON Web Tokens (RFC 7519) with
the key's id. Scopes are looked up with every request, so a token ends with its key.
"""

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jwt

from mint_jax.errors import UserError

FILE = "tokens.secret"
LIFE_S = 3600  # the SDK renews a token 300 s before its end
MAX_CHARACTERS = 1024  # longer tokens are not parsed
OPTIONS = {"verify_exp": False, "verify_iat": False}  # the server's clock decides


class Tokens:
    """Signs and verifies tokens. The secret is a file in the keys' ``folder``, so tokens outlive a
    restart; without keys it is the process's own. ``clock`` gives seconds since 1970.

    Raises:
        UserError: the secret's file cannot be read or made, or others may read it.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time):
        self._secret = secrets.token_bytes(32) if folder is None else _kept(folder / FILE)
        self._clock = clock

    def make(self, key: str) -> str:
        """Returns a token for a key's id, valid for ``LIFE_S`` seconds."""
        now = int(self._clock())
        return jwt.encode({"sub": key, "iat": now, "exp": now + LIFE_S}, self._secret, "HS256")

    def key_of(self, token: str) -> str | None:
        """Returns the id of a token's key; None if it is invalid or has expired."""
        if len(token) > MAX_CHARACTERS:
            return None
        with contextlib.suppress(jwt.PyJWTError, ValueError):
            claims = jwt.decode(token, self._secret, ["HS256"], options=OPTIONS)  # type: ignore[arg-type]
            return claims["sub"] if self._clock() < claims["exp"] else None
        return None


def is_token(secret: str) -> bool:
    """Returns whether a credential is a token: keys have no full stops."""
    return secret.count(".") == 2


def _kept(path: Path) -> bytes:
    """Returns the signing secret, made if missing: once, even if two servers start together."""
    try:
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=path.parent) as made:  # mode 600
                made.write(secrets.token_bytes(32))
                made.flush()
                os.fsync(made.fileno())
                with contextlib.suppress(FileExistsError):
                    os.link(made.name, path)
        mode, data = path.stat().st_mode & 0o777, path.read_bytes()
    except OSError as error:
        problem = f"cannot be read or made ({error.strerror})"
        raise UserError(f"{path} {problem}: let the server's user write in its folder") from error
    if mode & 0o077:
        problem = f"may be read or written by others (mode {mode:o})"
        raise UserError(f"{path} {problem}: chmod 600 {path}")
    if len(data) != 32:
        problem = f"has {len(data)} bytes; expected 32"
        raise UserError(f"{path} {problem}: delete it, and clients ask for new tokens")
    return data
