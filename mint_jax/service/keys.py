"""API keys: tenants and scopes. ``python -m mint_jax.service.keys add|list|revoke --folder DIR
...``

A key is 32 random bytes, shown once as a prefix and 43 characters of base64url. The file
``keys.json`` has its SHA-256, and no salt or slow hash: those make guessing of passwords dear,
while nobody guesses 256 random bits, whatever a guess costs. Checking looks at the last 43
characters alone, since clients differ in the prefix that they accept (the Tinker SDK takes
``tml-``, others ``sk-``).

A server reads the file again when it has changed. What the commands write appears whole, for its
owner alone, and one at a time.
"""

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mint_jax.errors import UserError, choice
from mint_jax.files import write_file
from mint_jax.service.tokens import Tokens, is_token

SCOPES = ("read", "sample", "train", "admin")
PREFIX = "tml-mint-"
FILE = "keys.json"
CHARACTERS = 43  # of base64url, for 32 bytes
CHECK_S = 1.0  # seconds between two looks at the file
_SECRET = re.compile(r"[A-Za-z0-9_-]{43,128}")  # with a prefix; two keys joined by a comma are none
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True)
class Key:
    """A stored key.

    Attributes:
        id: by which it is listed and revoked; no secret.
        tenant: whose requests are made with it.
        scopes: of ``SCOPES``.
        hash: SHA-256 of the key's last 43 characters, in hexadecimal.
        created, expires: times with a zone, ISO 8601; no end where ``expires`` is empty.
    """

    id: str
    tenant: str
    scopes: tuple[str, ...]
    hash: str
    created: str
    expires: str = ""
    note: str = ""

    def __post_init__(self):
        if not NAME.fullmatch(self.tenant):
            raise UserError(
                f"tenant is {self.tenant!r}; expected 1 to 64 letters, digits, '.', '_' or '-', the"
                " first a letter or digit"
            )
        if not self.scopes:
            raise UserError(f"key {self.id!r} has no scope; give it some of: {', '.join(SCOPES)}")
        for scope in self.scopes:
            if scope not in SCOPES:
                raise choice("scope", scope, SCOPES)
        if not re.fullmatch("[0-9a-f]{64}", self.hash):
            raise UserError(
                f"key {self.id!r} has a hash that is not a SHA-256 in hexadecimal: revoke it and"
                " add another"
            )
        for what in ("created", "expires"):
            _seconds(self, what)

    def expired(self, now: float) -> bool:
        """Returns whether the key has expired at ``now``, seconds since 1970."""
        return bool(self.expires) and now >= _seconds(self, "expires")


class Keys:
    """The keys of a server, from ``folder / keys.json``; for one thread.

    Args:
        clock: seconds since 1970, for keys that expire.
        monotonic: seconds, for how often the file is looked at.

    Raises:
        UserError: the file is missing, cannot be read or understood, or others than its owner may
            write it.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.path = folder / FILE
        self._clock, self._monotonic = clock, monotonic
        self._version: tuple[int, ...] = ()
        self._by_start: dict[bytes, list[Key]] = {}
        self._by_id: dict[str, Key] = {}
        self._problem = ""  # why the file's keys are not known
        self._look()
        if self._problem:
            raise UserError(self._problem)
        self.tokens = Tokens(folder, clock)

    def find(self, secret: str) -> Key | None:
        """Returns the key of a secret or of a token; None if it is unknown, revoked or expired.

        Hashes are compared in constant time. They are looked up by their first four bytes, which
        tells nothing of a key: who asks can compute the hash of a guess, but cannot find a guess
        for a hash.

        Raises:
            UserError: as at construction, of a file that has changed since. No key is good then.
        """
        self._need()
        found = self._of_token(secret) if is_token(secret) else self._of_key(secret)
        return None if found is None or found.expired(self._clock()) else found

    def _of_key(self, secret: str) -> Key | None:
        digest = _digest(secret)
        if digest is None:
            return None
        found = None
        for key in self._by_start.get(digest[:4], []):
            if hmac.compare_digest(bytes.fromhex(key.hash), digest):
                found = key
        return found

    def _of_token(self, secret: str) -> Key | None:
        id = self.tokens.key_of(secret)
        return None if id is None else self._by_id.get(id)

    def by_id(self, id: str) -> Key | None:
        """Returns a key by id; None if it was revoked or has expired.

        Raises:
            UserError: as ``find``.
        """
        self._need()
        found = self._by_id.get(id)
        return None if found is None or found.expired(self._clock()) else found

    def _need(self) -> None:
        if self._monotonic() - self._looked >= CHECK_S:
            self._look()
        if self._problem:
            raise UserError(self._problem)

    def _look(self) -> None:
        """Reads the file if it is another than before. A file that cannot be used leaves no key
        that is good.
        """
        self._looked = self._monotonic()
        folder = self.path.parent
        try:
            status = self.path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
            if version == self._version:
                return
            self._by_start, self._by_id, self._version, self._problem = {}, {}, (), ""
            if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
                raise UserError(
                    f"{self.path} may be written by others (mode {stat.S_IMODE(status.st_mode):o}):"
                    f" chmod 600 {self.path}"
                )
            for key in read(folder):
                self._by_start.setdefault(bytes.fromhex(key.hash)[:4], []).append(key)
                self._by_id[key.id] = key
            self._version = version
        except FileNotFoundError:
            command = (
                f"python -m mint_jax.service.keys add --folder {folder} --tenant T --scopes"
                " sample,train"
            )
            self._fail(f"there is no {self.path}; make a key with: {command}")
        except OSError as error:
            self._fail(
                f"{self.path} cannot be read ({error.strerror}): let the server's user read it"
            )
        except UserError as error:
            self._fail(str(error))

    def _fail(self, problem: str) -> None:
        self._by_start, self._by_id, self._version, self._problem = {}, {}, (), problem


def read(folder: Path) -> list[Key]:
    """The keys of ``folder / keys.json``, in the order in which they were added.

    Raises:
        UserError: it is not such a file.
        OSError: it cannot be read.
    """
    path = folder / FILE
    data = path.read_bytes()
    try:
        entries = json.loads(data)
        keys = [Key(**{**entry, "scopes": tuple(entry["scopes"])}) for entry in entries]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is not a list of keys ({error}): repair it, or restore a copy of it"
        ) from error
    return keys


def add(
    folder: Path,
    tenant: str,
    scopes: Iterable[str],
    *,
    days: float | None = None,
    note: str = "",
    prefix: str = PREFIX,
) -> tuple[Key, str]:
    """Makes a key and keeps its hash.

    Args:
        days: after which it is no longer good.
        prefix: what the key that is shown begins with.

    Returns:
        What is kept, and the key itself, which is not.

    Raises:
        UserError: a bad tenant, scope, prefix or number of days, or a bad file.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{0,32}", prefix):
        raise UserError(f"prefix is {prefix!r}; expected up to 32 letters, digits, '_' or '-'")
    if days is not None and not 0 < days <= 36_500:
        raise UserError(f"days is {days}; expected a number above 0 and at most 36500")
    now = datetime.datetime.now(datetime.UTC)
    expires = "" if days is None else (now + datetime.timedelta(days=days)).isoformat()
    secret = prefix + secrets.token_urlsafe(32)
    digest = _digest(secret)
    assert digest is not None
    key = Key(
        secrets.token_hex(6),
        tenant,
        tuple(dict.fromkeys(scopes)),
        digest.hex(),
        now.isoformat(),
        expires,
        note,
    )
    with alone(folder):
        _write(folder, [*(read(folder) if (folder / FILE).exists() else []), key])
    return key, secret


def revoke(folder: Path, id: str) -> Key:
    """Removes a key; a running server refuses it within a second or two.

    Raises:
        UserError: there is none of this id, or a bad file.
    """
    with alone(folder):
        keys = read(folder) if (folder / FILE).exists() else []
        for key in keys:
            if key.id == id:
                _write(folder, [other for other in keys if other.id != id])
                return key
    raise UserError(
        f"{folder / FILE} has no key {id!r}: see python -m mint_jax.service.keys list --folder"
        f" {folder}"
    )


def _digest(secret: str) -> bytes | None:
    """Returns the hash of a key's last characters; None for a text that cannot be a key."""
    return (
        hashlib.sha256(secret[-CHARACTERS:].encode()).digest()
        if _SECRET.fullmatch(secret)
        else None
    )


def _seconds(key: Key, what: str) -> float:
    """Returns a time of a key as seconds since 1970; 0 if empty."""
    value = getattr(key, what)
    if not value and what == "expires":
        return 0.0
    try:
        moment = datetime.datetime.fromisoformat(value)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{what} of key {key.id!r} is {value!r}; expected a time such as"
            " 2027-01-31T12:00:00+00:00"
        ) from error
    if moment.tzinfo is None:
        raise UserError(
            f"{what} of key {key.id!r} is {value!r}, without a zone; write it as {value}+00:00"
        )
    return moment.timestamp()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
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
    # of the whole process: what others write in this moment is closed to others too, never open
    before = os.umask(0o077)
    try:
        write_file(
            folder / FILE, json.dumps([dataclasses.asdict(key) for key in keys], indent=1) + "\n"
        )
    finally:
        os.umask(before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The commands. Prints a new key once, alone on its line. Returns the exit status: 2 for a
    user's mistake.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mint_jax.service.keys", description="API keys of a server."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="make a key and print it, once")
    adding.add_argument("--tenant", required=True, help="whose requests are made with it")
    adding.add_argument("--scopes", required=True, help=f"some of {','.join(SCOPES)}")
    adding.add_argument("--days", type=float, help="after which it is no longer good")
    adding.add_argument("--note", default="", help="what it is for")
    adding.add_argument(
        "--prefix",
        default=PREFIX,
        help="what it begins with: tml-... for the Tinker SDK, sk-... for others",
    )
    listing = commands.add_parser("list", help="print what is kept of each key")
    revoking = commands.add_parser("revoke", help="remove a key")
    revoking.add_argument("id", help="as `list` prints it")
    for command in (adding, listing, revoking):
        command.add_argument("--folder", type=Path, required=True, help="the server's folder")
    given = parser.parse_args(arguments)
    try:
        if given.command == "add":
            scopes = [scope.strip() for scope in given.scopes.split(",")]
            key, secret = add(
                given.folder,
                given.tenant,
                scopes,
                days=given.days,
                note=given.note,
                prefix=given.prefix,
            )
            print(
                f"key {key.id} of tenant {key.tenant}: {', '.join(key.scopes)}; it is shown this"
                " once",
                file=sys.stderr,
            )
            print(secret)
        elif given.command == "revoke":
            key = revoke(given.folder, given.id)
            print(f"revoked key {key.id} of tenant {key.tenant}")
        else:
            for key in read(given.folder):
                print(
                    key.id,
                    key.tenant,
                    ",".join(key.scopes),
                    key.created,
                    key.expires or "-",
                    key.note,
                    sep="\t",
                )
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
