"""Quotas of tenants, in ``quotas.json`` next to ``keys.json``; a server follows its changes.

Load is temporary: requests and tokens in flight beyond a quota are ``Busy``, 429, and clients
retry. Policies in training and bytes beyond a quota are ``OverQuota``, 403, at which clients stop
(the Tinker SDK retries for minutes after 409, 429 and 5xx, and for an hour after 402); so is a
request that would never fit.
"""

import collections
import logging
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Annotated

import pydantic

from mint_jax.errors import UserError
from mint_jax.service.keys import ReloadedFile

log = logging.getLogger("mint_jax.service")

FILE = "quotas.json"
RETRY_S = 1.0
Limit = Annotated[int, pydantic.Field(ge=0, strict=True)] | None


class Busy(UserError):
    """A quota of load is used up for now: retry after ``retry_after_s``."""

    retry_after_s = RETRY_S


class OverQuota(UserError):
    """A quota of owned objects is used up, or a request exceeds a quota by itself."""


class Quota(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Limits of one tenant; None is no limit. Tokens are those of prompts, possible completions and
    training data, until they end; bytes those of named checkpoints, each content once, and of
    training states.
    """

    requests: Limit = None
    tokens: Limit = None
    policies: Limit = None
    bytes: Limit = None


_QUOTAS = pydantic.TypeAdapter(dict[str, Quota])


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
        self._file, self._problem = None, ""
        self._named: dict[str, Quota] = {}
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
        own = self._named.get(tenant, self.default)
        return self.default.model_copy(update=own.model_dump(exclude_none=True))

    def begin(self, key: Hashable, tenant: str, tokens: int) -> bool:
        """Counts tokens as in flight, once for a key: (model, number) of a training request, else
        anything but a tuple. A request that all others of its model wait for is always accepted.
        Raises ``Busy``, and ``OverQuota`` for more than the tenant may ever have.
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
            self.tokens[tenant] += tokens
        return True

    def _is_waited_for(self, key: Hashable) -> bool:
        return isinstance(key, tuple) and key < min(self._keys_of(key[0]), default=key)

    def _keys_of(self, model: str) -> list[tuple[str, int]]:
        return [key for key in self._in_flight if isinstance(key, tuple) and key[0] == model]

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
            keys = self._keys_of(model) if number is None else [(model, number)]
        for key in keys:
            self.end(key)


def read(folder: Path) -> dict[str, Quota]:
    """Returns the quotas of a folder by tenant; empty without the file. Raises ``UserError`` if it
    is malformed.
    """
    path = folder / FILE
    try:
        return _QUOTAS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except pydantic.ValidationError as error:
        raise UserError(
            f"{path} has no quotas by tenant ({error}): repair it, or restore a copy of it"
        ) from error
