"""Fair scheduling: virtual counters of each tenant's service (Sheng et al. 2024, arXiv
2401.00588, algorithm 2).

The tenant with the least service comes next. After a pause a tenant is lifted to the
least counter of the busy tenants, so it cannot save up service. With n tenants that always have
work, the service of any two differs by at most two slices (theorem 4.4), and each gets at least
1/n. Service is counted in device seconds, which prefill, decode and training have in common.
"""

import collections
import threading
from collections.abc import Iterable


class Counters:
    """``seconds`` served to each tenant, and the counters that order them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = collections.defaultdict[str, float](float)
        self._busy = collections.Counter[str]()  # requests not ended
        self._last = 0.0  # the counter of the tenant that became idle last
        self.seconds = collections.defaultdict[str, float](float)

    def begin(self, tenant: str) -> None:
        """Counts a new request of a tenant."""
        with self._lock:
            if not self._busy[tenant]:
                busy = [self._counters[one] for one, count in self._busy.items() if count]
                self._counters[tenant] = max(self._counters[tenant], min(busy, default=self._last))
            self._busy[tenant] += 1

    def end(self, tenant: str) -> None:
        """Counts a request as ended."""
        with self._lock:
            self._busy[tenant] -= 1
            if not self._busy[tenant]:
                del self._busy[tenant]
                self._last = self._counters[tenant]

    def charge(self, seconds: float, shares: Iterable[tuple[str, float]]) -> None:
        """Charges a dispatch's seconds to tenants in proportion to their shares."""
        shares = list(shares)
        total = sum(share for _, share in shares)
        with self._lock:
            for tenant, share in shares:
                self.seconds[tenant] += seconds * share / total
                self._counters[tenant] += seconds * share / total

    def order(self, tenants: Iterable[str]) -> list[str]:
        """Sorts tenants by service, least first; ties keep their order."""
        with self._lock:
            return sorted(dict.fromkeys(tenants), key=self._counters.__getitem__)
