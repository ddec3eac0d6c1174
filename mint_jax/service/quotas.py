"""Quotas of tenants, for load and for owned objects.

``python -m mint_jax.service.quotas set|list --folder DIR ...`` changes and lists them.

Load comes and goes: requests and tokens in flight beyond a quota are ``Busy``, 429, and clients ask
again by themselves. What is owned stays until its owner lets go: policies in training and bytes
beyond a quota are ``OverQuota``, 403, at which clients stop (the Tinker SDK asks again for minutes
after 409, 429 and 5xx, and for an hour after 402). A request that would never fit is ``OverQuota``
too.

The file ``quotas.json`` is in the folder of ``keys.json``. A server reads it again when it has
changed; if it cannot, it logs the failure and keeps the earlier quotas.
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
from typing import Any

from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.service.keys import CHECK_S, NAME, alone

log = logging.getLogger("mint_jax.service")

FILE = "quotas.json"
RETRY_S = 1.0
UNITS = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class Busy(UserError):
    """A quota of load is used up for now: ask again after ``retry_after_s``."""

    retry_after_s = RETRY_S


class OverQuota(UserError):
    """A quota of what is owned is used up, or a request larger than one; asking again does not
    help.
    """


@dataclasses.dataclass(frozen=True)
class Quota:
    """Limits of one tenant; None is no limit.

    Attributes:
        requests: HTTP requests in flight, long polls not counted.
        tokens: in flight: of samples the prompts and all that may be drawn, of training the data,
            until they have ended.
        policies: in training, until they are unloaded or their session ends.
        bytes: of checkpoints that have names, each content once, and of the training states
            (weights and two moments) of policies.
    """

    requests: int | None = None
    tokens: int | None = None
    policies: int | None = None
    bytes: int | None = None

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value is not None and (type(value) is not int or value < 0):
                raise UserError(
                    f"quota {name} is {value!r}; expected a whole number, 0 or more, or null for no"
                    " limit"
                )

    def over(self, other: "Quota") -> "Quota":
        """This one, with the other's limits where it has none."""
        mine = {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }
        return dataclasses.replace(other, **mine)


class Quotas:
    """The quotas of all tenants, and who has how many tokens in flight; may be called from any
    thread.

    Args:
        default: of a tenant that the file does not name, and of what it leaves open.
        folder: of the file; None, or no file there: ``default`` for all.
        monotonic: seconds, for how often the file is looked at.

    Attributes:
        tokens: in flight, by tenant.

    Raises:
        UserError: the file cannot be read or understood.
    """

    def __init__(
        self,
        default: Quota | None = None,
        folder: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.default, self._path, self._monotonic = (
            default or Quota(),
            None if folder is None else folder / FILE,
            monotonic,
        )
        self._lock = threading.Lock()
        self._held: dict[Hashable, tuple[str, int]] = {}
        self.tokens: collections.Counter[str] = collections.Counter()
        self._named: dict[str, Quota] = {}
        self._version: tuple[int, ...] | None = None
        self._looked = monotonic()
        self._read()

    def of(self, tenant: str) -> Quota:
        """A tenant's limits now."""
        if self._path is not None and self._monotonic() - self._looked >= CHECK_S:
            self._looked = self._monotonic()
            try:
                self._read()
            except UserError as error:
                log.error("quotas: %s; those of before hold", error)
        named = self._named.get(tenant)
        return self.default if named is None else named.over(self.default)

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            version = ()
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be read ({error.strerror}): let the server's user read it"
            ) from error
        if version != self._version:
            self._version = version
            self._named = read(self._path.parent)

    # -- tokens in flight

    def begin(self, key: Hashable, tenant: str, tokens: int) -> bool:
        """Counts tokens as in flight, under a key once; whether they were not counted before.

        A training request that all others of its model wait for is let in whatever is in flight:
        refused, it would hold up those that have to end first.

        Args:
            key: of a training request its model and number, of anything else what is no tuple.

        Raises:
            Busy: others of the tenant have to end first.
            OverQuota: more than the tenant may ever have.
        """
        most = self.of(tenant).tokens
        if most is not None and tokens > most:
            raise OverQuota(
                f"the request has {tokens} tokens, what it may draw included; tenant {tenant} may"
                f" have {most} in flight: ask for fewer at once, or ask the server's operator for a"
                " larger quota"
            )
        with self._lock:
            if key in self._held:
                return False
            if (
                most is not None
                and self.tokens[tenant] + tokens > most
                and not self._is_waited_for(key)
            ):
                has = self.tokens[tenant]
                raise Busy(
                    f"tenant {tenant} has {has} tokens in flight and asks for {tokens} more, of"
                    f" {most}: ask again later"
                )
            self._held[key] = tenant, tokens
            if tokens:
                self.tokens[tenant] += tokens
        return True

    def _is_waited_for(self, key: Hashable) -> bool:
        numbers = (
            [held[1] for held in self._held if isinstance(held, tuple) and held[0] == key[0]]
            if isinstance(key, tuple)
            else []
        )
        return bool(numbers) and key[1] < min(numbers)  # type: ignore[index]

    def end(self, key: Hashable) -> None:
        """Releases the tokens of a key; an unknown key is ignored."""
        with self._lock:
            tenant, tokens = self._held.pop(key, ("", 0))
            if tokens:
                self.tokens[tenant] -= tokens
                if not self.tokens[tenant]:
                    del self.tokens[tenant]

    def end_all(self, model: str) -> None:
        """All training requests of a model, whose keys are (model, number), have ended."""
        with self._lock:
            mine = [key for key in self._held if isinstance(key, tuple) and key[0] == model]
        for key in mine:
            self.end(key)


def read(folder: Path) -> dict[str, Quota]:
    """The quotas of ``folder / quotas.json`` by tenant; none where there is no file.

    Raises:
        UserError: it is not such a file, or cannot be read.
    """
    path = folder / FILE
    try:
        return {
            str(tenant): Quota(**told) for tenant, told in json.loads(path.read_bytes()).items()
        }
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): let the server's user read it"
        ) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} has no quotas by tenant ({error}): repair it, or restore a copy of it"
        ) from error


def set_quota(folder: Path, tenant: str, **limits: int | None) -> Quota:
    """Sets limits of a tenant and keeps its others; None removes one. A running server follows
    within two seconds.

    Raises:
        UserError: a bad tenant, limit or file.
    """
    if not NAME.fullmatch(tenant):
        raise UserError(
            f"tenant is {tenant!r}; expected 1 to 64 letters, digits, '.', '_' or '-', the first a"
            " letter or digit"
        )
    with alone(folder):
        quotas = read(folder)
        quotas[tenant] = dataclasses.replace(quotas.get(tenant, Quota()), **limits)
        told = {name: dataclasses.asdict(quota) for name, quota in sorted(quotas.items())}
        write_file(folder / FILE, json.dumps(told, indent=1) + "\n")
    return quotas[tenant]


def _number(text: str) -> int | None:
    """A number as people write it: ``20``, ``100k``, ``4Gi``; ``none`` for no limit."""
    if text == "none":
        return None
    digits = text.rstrip("kKmMgGtTi")
    with contextlib.suppress(ValueError, KeyError):
        return int(digits) * (UNITS[text[len(digits) :].lower()] if digits != text else 1)
    raise UserError(f"limit is {text!r}; expected a number such as 20, 100k or 4Gi, or none")


def main(arguments: Sequence[str] | None = None) -> int:
    """The commands. Returns the exit status: 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m mint_jax.service.quotas", description="What tenants of a server may have."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    setting = commands.add_parser(
        "set", help="change a tenant's limits: numbers such as 20, 100k or 4Gi, or none"
    )
    setting.add_argument("--tenant", required=True, help="whose they are")
    helps = {
        "requests": "HTTP requests in flight",
        "tokens": "tokens in flight",
        "policies": "policies in training",
    }
    for name, what in (helps | {"bytes": "bytes of checkpoints and training states"}).items():
        setting.add_argument(f"--{name}", help=what)
    listing = commands.add_parser("list", help="print each tenant's limits")
    for command in (setting, listing):
        command.add_argument(
            "--folder", type=Path, required=True, help="the server's folder of keys"
        )
    given = parser.parse_args(arguments)
    try:
        found: dict[str, Any] = read(given.folder)
        if given.command == "set":
            wanted = {name: getattr(given, name) for name in dataclasses.asdict(Quota())}
            limits = {name: _number(text) for name, text in wanted.items() if text is not None}
            found = {given.tenant: set_quota(given.folder, given.tenant, **limits)}
        for tenant, quota in found.items():
            limits = (
                f"{name}={'-' if value is None else value}"
                for name, value in dataclasses.asdict(quota).items()
            )
            print(tenant, *limits, sep="\t")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
