"""What one tenant may take of what all share, and what each takes now."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Quota:
    """Limits of one tenant; None is no limit.

    A copy counts for the tenant whose request brought it in, also while others use it.

    Attributes:
        host_bytes, host_entries: of the host cache. Beyond them its own copies of the lowest score
            go; where those are in use, the new one is loaded without being kept.
        slots: device slots over all buckets. Beyond them its own go; where those are in use, the
            load waits.
        loads: unfinished loads. Beyond them it is refused with ``retry_after_s``.
    """

    host_bytes: int | None = None
    host_entries: int | None = None
    slots: int | None = None
    loads: int | None = None


@dataclasses.dataclass(frozen=True)
class Quotas:
    """The quota of every tenant: ``named``, for all others ``default``."""

    default: Quota = Quota()
    named: Mapping[str, Quota] = dataclasses.field(default_factory=dict)

    def of(self, tenant: str) -> Quota:
        return self.named.get(tenant, self.default)


class Use:
    """Entries and bytes by tenant; a tenant without any is not listed."""

    def __init__(self) -> None:
        self._use: dict[str, tuple[int, int]] = {}

    def add(self, tenant: str, nbytes: int, entries: int = 1) -> None:
        """Adds one entry, or takes one away with ``-nbytes`` and ``-1``."""
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
    """Whether a limit, if there is one, is kept."""
    return limit is None or value <= limit
