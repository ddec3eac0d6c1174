"""Quotas of tenants, in ``quotas.json`` next to ``keys.json``; a server follows its changes.

Load is temporary: requests and tokens in flight beyond a quota are ``Busy``, 429, and clients
retry. Policies in training and bytes beyond a quota are ``OverQuota``, 403, at which clients stop
(the Tinker SDK retries for minutes after 409, 429 and 5xx, and for an hour after 402); so is a
request that would never fit.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.service.keys import ReloadedFile, check_tenant, locked

log = logging.getLogger("mint_jax.service")

FILE = "quotas.json"
RETRY_S = 1.0
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
HELP = {
    "requests": "HTTP requests in flight",
    "tokens": "tokens in flight",
    "policies": "policies in training",
    "bytes": "bytes of checkpoints and training states",
}


class Busy(UserError):
    """A quota of load is used up for now: retry after ``retry_after_s``."""

    retry_after_s = RETRY_S


class OverQuota(UserError):
    """A quota of owned objects is used up, or a request exceeds a quota by itself."""


@dataclasses.dataclass(frozen=True)
class Quota:
    """Limits of one tenant; None is no limit. Tokens are those of prompts, possible completions and
    training data, until they end; bytes those of named checkpoints, each content once, and of
    training states.
    """

    requests: int | None = None
    tokens: int | None = None
    policies: int | None = None
    bytes: int | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None and (type(value) is not int or value < 0):
                raise UserError(
                    f"quota {name} is {value!r}; expected a whole number, 0 or more, or null for no"
                    " limit"
                )

    def over(self, other: "Quota") -> "Quota":
        """Returns this quota with the other's limits where it has none."""
        limits = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(other, **limits)


class Quotas:
    """The quotas of all tenants and their ``tokens`` in flight. Thread-safe. ``default`` applies to
    tenants and limits that the folder's file does not name. Raises ``UserError`` for a bad file.
    """

    def __init__(
        self,
        default: Quota | None = None,
        folder: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.default, self._lock = default or Quota(), threading.Lock()
        self._file = None
        self._named: dict[str, Quota] = {}
        self._problem = ""
        if folder is not None:
            self._file = ReloadedFile(folder / FILE, lambda: read(folder), monotonic)
            self._named = self._file.get()
        self._in_flight: dict[Hashable, tuple[str, int]] = {}
        self.tokens: collections.Counter[str] = collections.Counter()

    def of(self, tenant: str) -> Quota:
        """Returns a tenant's current limits."""
        if self._file is not None:
            try:
                self._named, self._problem = self._file.get(), ""
            except UserError as error:
                if self._problem != str(error):
                    self._problem = str(error)
                    log.error("quotas: %s; the earlier ones stay", error)
        named = self._named.get(tenant)
        return self.default if named is None else named.over(self.default)

    # -- tokens in flight

    def begin(self, key: Hashable, tenant: str, tokens: int) -> bool:
        """Counts tokens as in flight, once for a key: (model, number) of a training request, else
        anything but a tuple. A request that all others of its model wait for is always accepted.
        Raises ``Busy``: others have to end first; ``OverQuota``: more than the tenant may ever
        have.
        """
        most = self.of(tenant).tokens
        if most is not None and tokens > most:
            raise OverQuota(
                f"the request has {tokens} tokens, what it may draw included; tenant {tenant} may"
                f" have {most} in flight: ask for fewer at once, or ask the server's operator for a"
                " larger quota"
            )
        with self._lock:
            if key in self._in_flight:
                return False
            used = self.tokens[tenant]
            if most is not None and used + tokens > most and not self._is_waited_for(key):
                raise Busy(
                    f"tenant {tenant} has {used} tokens in flight and asks for {tokens} more, of"
                    f" {most}: ask again later"
                )
            self._in_flight[key] = tenant, tokens
            if tokens:
                self.tokens[tenant] += tokens
        return True

    def _is_waited_for(self, key: Hashable) -> bool:
        if not isinstance(key, tuple):
            return False
        numbers = [one[1] for one in self._in_flight if isinstance(one, tuple) and one[0] == key[0]]
        return bool(numbers) and key[1] < min(numbers)

    def end(self, key: Hashable) -> None:
        """Releases the tokens of a key; an unknown key is ignored."""
        with self._lock:
            tenant, tokens = self._in_flight.pop(key, ("", 0))
            self.tokens[tenant] -= tokens
            if not self.tokens[tenant]:
                del self.tokens[tenant]

    def end_request(self, model: str, number: int | None) -> None:
        """Releases a training request; all requests of its model if the number is None."""
        with self._lock:
            keys = [key for key in self._in_flight if isinstance(key, tuple) and key[0] == model]
        for key in keys if number is None else [(model, number)]:
            self.end(key)


def read(folder: Path) -> dict[str, Quota]:
    """Returns the quotas of a folder by tenant; empty without the file. Raises ``UserError`` if it
    is malformed.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_bytes())
        return {str(tenant): Quota(**limits) for tenant, limits in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} has no quotas by tenant ({error}): repair it, or restore a copy of it"
        ) from error


def set_quota(folder: Path, tenant: str, **limits: int | None) -> Quota:
    """Sets limits of a tenant and keeps its others; None removes one. Raises ``UserError`` for a
    bad tenant, limit or file.
    """
    check_tenant(tenant)
    with locked(folder):
        quotas = read(folder)
        quotas[tenant] = dataclasses.replace(quotas.get(tenant, Quota()), **limits)
        stored = {name: vars(quota) for name, quota in sorted(quotas.items())}
        write_file(folder / FILE, json.dumps(stored, indent=1) + "\n")
    return quotas[tenant]


def _number(text: str) -> int | None:
    """Parses ``20``, ``100k`` or ``4Gi``; ``none`` is no limit."""
    if text == "none":
        return None
    digits = text.rstrip("kKmMgGtTi")
    with contextlib.suppress(ValueError, KeyError):
        return int(digits) * (UNITS[text[len(digits) :].lower()] if digits != text else 1)
    raise UserError(f"limit is {text!r}; expected a number such as 20, 100k or 4Gi, or none")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m mint_jax.service.quotas", description="Quotas of a server's tenants."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    changes = "change a tenant's limits: numbers such as 20, 100k or 4Gi, or none"
    setting = commands.add_parser("set", help=changes)
    setting.add_argument("--tenant", required=True, help="name of the tenant")
    for name, text in HELP.items():
        setting.add_argument(f"--{name}", help=text)
    listing = commands.add_parser("list", help="print each tenant's limits")
    for command in (setting, listing):
        command.add_argument("--folder", type=Path, required=True, help="the folder of keys")
    given = parser.parse_args(arguments)
    try:
        found = read(given.folder)
        if given.command == "set":
            texts = {name: getattr(given, name) for name in HELP}
            limits = {name: _number(text) for name, text in texts.items() if text is not None}
            found = {given.tenant: set_quota(given.folder, given.tenant, **limits)}
        for tenant, quota in found.items():
            limits = vars(quota).items()
            print(tenant, *(f"{k}={'-' if v is None else v}" for k, v in limits), sep="\t")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
