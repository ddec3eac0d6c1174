"""Sessions and models of tenants: which sessions are open, and what a tenant's quota allows."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mint_jax.service.book import Book, Model, NotFound
from mint_jax.service.quotas import OverQuota, Quotas


class Tenancy:
    """Open sessions and quotas of one server; may be called from any thread. A session ends after
    ``session_s`` seconds without contact.
    """

    def __init__(self, book: Book, quotas: Quotas, session_s: float):
        self._book, self._quotas, self.session_s = book, quotas, session_s
        self.monotonic: Callable[[], float] = time.monotonic
        self._adding = threading.Lock()  # of the check of a quota and the new model
        # of open sessions: tenant and time of the last contact; each access is atomic
        self._contacts: dict[str, tuple[str, float]] = {}

    def is_open(self, tenant: str, session: str) -> bool:
        """Returns whether a session is open, and counts as a heartbeat. Raises ``NotFound``."""
        is_known = self._contacts.get(session, ("", 0.0))[0] == tenant
        if not is_known and self._book.session(tenant, session).ended is not None:
            return False
        self._contacts[session] = tenant, self.monotonic()
        return True

    def need_open(self, tenant: str, session: str) -> None:
        """Raises ``NotFound`` unless the tenant's session is open."""
        if not self.is_open(tenant, session):
            raise NotFound(f"session {session!r} is over: open a new one")

    def silent(self) -> list[str]:
        """Returns open sessions without contact for ``session_s``, counted while a server runs: a
        session from before this start counts from the first call that finds it.
        """
        now, tenants = self.monotonic(), self._book.open_sessions()
        for ended in set(self._contacts) - tenants.keys():
            self._contacts.pop(ended, None)
        return [
            id
            for id, tenant in tenants.items()
            if now - self._contacts.setdefault(id, (tenant, now))[1] >= self.session_s
        ]

    def end_session(self, id: str) -> list[str]:
        """Ends a session; returns its models that had not ended."""
        models = self._book.end_session(id)
        self._contacts.pop(id, None)
        return models

    def add_model(
        self, session: str, number: int, tenant: str, details: Mapping[str, Any]
    ) -> Model:
        """Returns a session's model of this number, created unless it exists. A model without a
        rank cannot be trained and needs no quota. Raises ``OverQuota``: the tenant has as many
        policies, or bytes, as it may.
        """
        with self._adding:
            if "rank" in details:
                self._check(tenant, details["nbytes"], f"{session}:train:{number}")
            return self._book.add_model(session, number, tenant, details)

    def need_room(self, tenant: str, more: int) -> None:
        """Raises ``OverQuota`` if this many more bytes exceed the tenant's quota."""
        if more > 0:
            self._check(tenant, more)

    def _check(self, tenant: str, more: int, new: str = "") -> None:
        """Raises ``OverQuota`` if the bytes, or the ``new`` policy, exceed the tenant's quota."""
        quota = self._quotas.of(tenant)
        if quota.policies is None and quota.bytes is None:
            return
        living = self._book.living(tenant)
        trained = [model for model in living if "rank" in model.details and model.id != new]
        if new and quota.policies is not None and len(trained) >= quota.policies:
            raise OverQuota(
                f"tenant {tenant} has {len(trained)} policies in training, of {quota.policies}:"
                " unload one, or finish a session that is no longer needed; its checkpoints stay"
            )
        used = self._book.checkpoint_totals(tenant)[1]
        used += sum(model.details["nbytes"] for model in trained)
        if quota.bytes is not None and used + more > quota.bytes:
            raise OverQuota(
                f"tenant {tenant} has {used} bytes of checkpoints and training states and asks for"
                f" {more} more, of {quota.bytes}: delete checkpoints, or unload policies"
            )
