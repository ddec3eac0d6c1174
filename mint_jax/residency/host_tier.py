"""Packed bytes on the host: from the cache, or fetched, verified, admitted and cached."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mint_jax.digest import blake3_alone
from mint_jax.errors import UserError
from mint_jax.residency.admission import Admission, verify
from mint_jax.residency.host_cache import HostCache
from mint_jax.residency.metrics import Metrics

# digest -> the packed object, uint8, read-only; it must not change later
Fetch = Callable[[str], np.ndarray]
# packed object -> (tree of views into it, schema with .base and .config)
Unpack = Callable[[np.ndarray], tuple[Any, Any]]


class Unpacked(NamedTuple):
    """An admitted revision on the host.

    Attributes:
        adapter: views of the packed bytes ``[L, (E,) r, D]``.
        schema: has ``base`` and ``config``.
        cold: the bytes were just read from storage.
    """

    adapter: Any
    schema: Any
    cold: bool


class HostTier:
    """The host cache with its loading path.

    Bytes are verified and admitted once, when they come from storage. An object that the cache
    cannot store is used once and dropped.
    """

    def __init__(
        self,
        cache: HostCache,
        fetch: Fetch,
        unpack: Unpack,
        admission: Admission,
        metrics: Metrics,
        digest_of: Callable[[np.ndarray], str] = blake3_alone,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.cache, self._fetch, self._unpack, self._admission = cache, fetch, unpack, admission
        self._metrics, self._digest_of, self._clock = metrics, digest_of, clock

    @contextlib.contextmanager
    def lend(self, digest: str) -> Iterator[Unpacked]:
        """Yields a revision, unpacked; its bytes stay in place until the block ends.

        Raises:
            UserError: its digest does not match, or it does not fit; or what ``fetch`` raises.
        """
        buffer = self.cache.lease(digest)
        cold, kept = buffer is None, True
        (self._metrics.misses if cold else self._metrics.hits).labels("host").inc()
        if buffer is None:
            began = self._clock()
            adapter, schema, kept = self._admitted(digest, self._fetch(digest), began)
        try:
            if buffer is not None:
                adapter, schema = self._unpack(buffer)
            yield Unpacked(adapter, schema, cold)
        finally:
            if kept:
                self.cache.release(digest)

    def offer(self, digest: str, buffer: np.ndarray) -> bool:
        """Offers the cache a revision that is in memory already; returns True if it is cached. An
        adapter that does not fit is reported when it is requested.
        """
        if self.cache.lease(digest) is None:
            try:
                if not self._admitted(digest, buffer, self._clock())[-1]:
                    return False
            except UserError:
                return False
        self.cache.release(digest)
        return True

    def _admitted(self, digest: str, fetched: np.ndarray, began: float) -> tuple[Any, Any, bool]:
        """Returns views, schema, and True if the bytes are cached (and then leased)."""
        buffer = self.cache.reserve(digest, fetched)
        kept = buffer is not None
        if buffer is None:
            self._metrics.uncached.inc()
            buffer = fetched
        try:
            verify(digest, buffer, self._digest_of)
            adapter, schema = self._unpack(buffer)
            self._admission.check(digest, adapter, schema)
        except BaseException:
            if kept:
                self.cache.discard(digest)
            raise
        if kept:
            self.cache.confirm(digest, self._clock() - began)
        return adapter, schema, kept
