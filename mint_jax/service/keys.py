"""API keys: tenants and scopes.

``python -m mint_jax.service.keys add|list|revoke --folder DIR ...`` changes and lists them.

A key is 32 random bytes, shown once as a prefix and 43 characters of base64url. ``keys.json`` has
its SHA-256, without salt or slow hash: nobody guesses 256 random bits. A server reads the file
again when it has changed. The commands replace it as a whole, one command at a time.
"""

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import pydantic
from pydantic import AfterValidator, AwareDatetime, Field

from mint_jax.errors import UserError, choice
from mint_jax.files import write_file
from mint_jax.service.tokens import Tokens, is_token

SCOPES = ("read", "sample", "train", "admin")
PREFIX = "tml-mint-"
FILE = "keys.json"
CHARACTERS = 43  # of base64url, for 32 bytes
CHECK_S = 1.0  # seconds between two checks of a file
_SECRET = re.compile(r"[A-Za-z0-9_-]{43,128}")  # with a prefix; no comma, so not two keys
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
T = TypeVar("T")


def check_tenant(tenant: str) -> str:
    """Returns a tenant's name. Raises ``UserError`` if it is malformed."""
    if not _NAME.fullmatch(tenant):
        expected = "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        raise UserError(f"tenant is {tenant!r}; expected {expected}")
    return tenant


def _check_scopes(scopes: tuple[str, ...]) -> tuple[str, ...]:
    if not scopes:
        raise UserError(f"the key has no scope; give it some of: {', '.join(SCOPES)}")
    if unknown := [scope for scope in scopes if scope not in SCOPES]:
        raise choice("scope", unknown[0], SCOPES)
    return scopes


class Key(pydantic.BaseModel):
    """A stored key of a tenant. ``hash`` is the SHA-256 of its last 43 characters."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)
    id: str  # by which it is listed and revoked; not secret
    tenant: Annotated[str, AfterValidator(check_tenant)]
    scopes: Annotated[tuple[str, ...], AfterValidator(_check_scopes)]
    hash: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None


_KEYS = pydantic.TypeAdapter(list[Key])


class ReloadedFile(Generic[T]):
    """The content of a file, read again when it has changed. For one thread."""

    def __init__(self, path: Path, read: Callable[[], T], monotonic: Callable[[], float]):
        self._path, self._read, self._monotonic = path, read, monotonic
        self._checked, self._version, self._problem = float("-inf"), None, ""
        self._value: T | None = None

    def get(self) -> T:
        """Returns the content, at most ``CHECK_S`` seconds old. Raises ``UserError``."""
        if self._monotonic() - self._checked >= CHECK_S:
            self._checked = self._monotonic()
            try:
                version = ()
                with contextlib.suppress(FileNotFoundError):
                    status = self._path.stat()
                    version = status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode
                if version != self._version or self._problem:
                    self._value, self._version, self._problem = self._read(), version, ""
            except OSError as error:
                remedy = f"({error.strerror}): let the server's user read it"
                self._problem = f"{self._path} cannot be read {remedy}"
            except UserError as error:
                self._problem = str(error)
        if self._problem:
            raise UserError(self._problem)
        return self._value  # type: ignore[return-value]


class Keys:
    """The keys of a server, from ``folder / keys.json``. For one thread.

    ``clock`` gives seconds since 1970. Raises ``UserError`` if the file is missing, cannot be read,
    is malformed, or is writable by others than its owner. ``find`` and ``by_id`` raise it when it
    has become so: no key is valid then.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self._folder, self._clock = folder, clock
        self._file = ReloadedFile(folder / FILE, self._read, monotonic)
        self._file.get()
        self.tokens = Tokens(folder, clock)

    def find(self, secret: str) -> Key | None:
        """Returns the key of a secret or of a token; None if it is unknown, revoked or expired.

        Only the last 43 characters count: the Tinker SDK takes keys ``tml-...``, others ``sk-...``.
        The time of a lookup by hash reveals nothing: nobody has a guess for a hash.
        """
        if is_token(secret):
            return self.by_id(self.tokens.key_of(secret) or "")
        return self.by_id(_hash(secret)) if _SECRET.fullmatch(secret) else None

    def by_id(self, id: str) -> Key | None:
        """Returns a key by id or hash; None if it was revoked or has expired."""
        key = self._file.get().get(id)
        if key is None or key.expires is None or self._clock() < key.expires.timestamp():
            return key
        return None

    def _read(self) -> dict[str, Key]:
        path = self._folder / FILE
        if not path.exists():
            command = f"python -m mint_jax.service.keys add --folder {self._folder} --tenant T"
            raise UserError(f"there is no {path}; make a key with: {command} --scopes sample,train")
        if (mode := path.stat().st_mode) & 0o022:
            found = f"{path} may be written by others (mode {mode & 0o777:o})"
            raise UserError(f"{found}: chmod 600 {path}")
        return {name: key for key in read(self._folder) for name in (key.id, key.hash)}


def _hash(secret: str) -> str:
    return hashlib.sha256(secret[-CHARACTERS:].encode()).hexdigest()


def read(folder: Path) -> list[Key]:
    """Returns the keys of ``folder / keys.json``, in the order in which they were added. Raises
    ``UserError`` if it is malformed, and ``OSError``.
    """
    path = folder / FILE
    try:
        return _KEYS.validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        raise UserError(f"{path} is no list of keys ({error}): repair or restore it") from error


def add(
    folder: Path, tenant: str, scopes: Iterable[str], *, days: float | None = None
) -> tuple[Key, str]:
    """Makes a key that expires after ``days``, and stores its hash. Returns the stored key and the
    secret, which is not stored. Raises ``UserError``.
    """
    if days is not None and not 0 < days <= 36_500:
        raise UserError(f"days is {days}; expected a number above 0 and at most 36500")
    now, secret = datetime.datetime.now(datetime.UTC), PREFIX + secrets.token_urlsafe(32)
    key = Key(
        id=secrets.token_hex(6),
        tenant=check_tenant(tenant),
        scopes=_check_scopes(tuple(dict.fromkeys(scopes))),
        hash=_hash(secret),
        created=now,
        expires=None if days is None else now + datetime.timedelta(days=days),
    )
    with locked(folder):
        _write(folder, [*(read(folder) if (folder / FILE).exists() else []), key])
    return key, secret


def revoke(folder: Path, id: str) -> Key:
    """Removes a key; a running server refuses it within ``CHECK_S``. Raises ``UserError``."""
    with locked(folder):
        keys = {key.id: key for key in read(folder)}
        if (found := keys.pop(id, None)) is None:
            raise UserError(f"{folder / FILE} has no key {id!r}: the command list shows all")
        _write(folder, list(keys.values()))
    return found


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder for one change at a time over all processes, so that a key revoked
    meanwhile does not come back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(folder: Path, keys: list[Key]) -> None:
    # the mask is the process's: other files written at this moment get fewer permissions, not more
    before = os.umask(0o077)
    try:
        write_file(folder / FILE, _KEYS.dump_json(keys, indent=1))
    finally:
        os.umask(before)


_ADD = {
    "--tenant": {"required": True, "help": "owner of all that is made with the key"},
    "--scopes": {"required": True, "help": f"some of {','.join(SCOPES)}, joined by commas"},
    "--days": {"type": float, "help": "days until the key expires (default: it does not)"},
}
_COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "add": ("make a key and print it, once", _ADD),
    "revoke": ("remove a key for good", {"id": {"help": "the key's id, as `list` prints it"}}),
    "list": ("print id, tenant, scopes, creation and expiry of all keys", {}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit status: 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m mint_jax.service.keys", description="Makes, lists and revokes API keys."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    folder = {"type": Path, "required": True, "help": "of the keys: the server's setting api_keys"}
    for name, (text, options) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        for option, details in ({"--folder": folder} | options).items():
            command.add_argument(option, **details)
    given = parser.parse_args(arguments)
    try:
        if given.command == "add":
            scopes = [scope.strip() for scope in given.scopes.split(",")]
            key, secret = add(given.folder, given.tenant, scopes, days=given.days)
            about = f"key {key.id} of tenant {key.tenant}: {', '.join(key.scopes)}"
            print(f"{about}; it is shown this once", file=sys.stderr)
            print(secret)  # alone on stdout
        elif given.command == "revoke":
            key = revoke(given.folder, given.id)
            print(f"revoked key {key.id} of tenant {key.tenant}")
        else:
            for key in read(given.folder):
                scopes, expires = ",".join(key.scopes), key.expires or "-"
                print(key.id, key.tenant, scopes, key.created, expires, sep="\t")
    except (OSError, UserError) as error:
        text = str(error)
        if isinstance(error, OSError):
            place = error.filename or given.folder
            text = f"{place} cannot be used ({error.strerror}): check --folder"
        print(text, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
