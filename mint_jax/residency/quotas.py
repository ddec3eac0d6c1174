"""Limits of one tenant on shared resources, and the current use of each tenant."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class ResidencyQuota:
    """Limits of one tenant; None is no limit.

    A copy counts for the tenant whose request loaded it, even while others use it.

    Attributes:
        host_bytes, host_entries: of the host cache. Beyond them the tenant's own copies are
            evicted; if those are in use, the new one is loaded without being cached.
        slots: device slots over all buckets. Beyond them the tenant's own adapters are evicted; if
            those are in use, the load waits.
        loads: unfinished loads. Beyond them a request is refused with ``retry_after_s``.
    """

    host_bytes: int | None = None
    host_entries: int | None = None
    slots: int | None = None
    loads: int | None = None


@dataclasses.dataclass(frozen=True)
class ResidencyQuotas:
    """The quota of every tenant: ``named``, or else ``default``."""

    default: ResidencyQuota = ResidencyQuota()
    named: Mapping[str, ResidencyQuota] = dataclasses.field(default_factory=dict)

    def of(self, tenant: str) -> ResidencyQuota:
        return self.named.get(tenant, self.default)


class Use:
    """Entries and bytes by tenant; tenants without entries are not stored."""

    def __init__(self) -> None:
        self._use: dict[str, tuple[int, int]] = {}

    def add(self, tenant: str, nbytes: int, entries: int = 1) -> None:
        """Adds one entry, or removes one with ``-nbytes`` and ``-1``."""
        total = (self.entries(tenant) + entries, self.bytes(tenant) + nbytes)
        if total == (0, 0):
            self._use.pop(tenant, None)
        else:
            self._use[tenant] = total

    def entries(self, tenant: str) -> int:
        return self._use.get(tenant, (0, 0))[0]

    def bytes(self, tenant: str) -> int:
        return self._use.get(tenant, (0, 0))[1]


def within(value: int, limit: int | None) -> bool:
    """Returns True if the value does not exceed the limit; None is no limit."""
    return limit is None or value <= limit
