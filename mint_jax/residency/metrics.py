"""Residency's metrics for Prometheus."""

from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

T = TypeVar("T")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters, gauges and histograms of one residency; without a ``registry`` they are local.

    A request counts as a hit or miss of tier ``device``, a load as one of tier ``host``. Reasons of
    refusals are ``queue_full``, ``prefetch_dropped`` and ``failed``; sources of a load ``storage``
    and ``host``.
    """

    def __init__(self, registry: CollectorRegistry | None = None):
        def made(kind: type[T], name: str, text: str, *labels: str, **how: Any) -> T:
            make: Any = kind
            return make(f"mint_residency_{name}", text, labels, registry=registry, **how)

        self.hits = made(Counter, "hits", "Found in a tier.", "tier")
        self.misses = made(Counter, "misses", "Not found in a tier.", "tier")
        self.joined = made(Counter, "joined", "Requests that joined an unfinished load.")
        self.evictions = made(Counter, "evictions", "Copies that were evicted.", "tier")
        self.refusals = made(Counter, "refusals", "Loads refused, dropped or failed.", "reason")
        self.uncached = made(Counter, "uncached", "Loads that the host cache could not store.")
        self.queue_wait = made(
            Histogram, "queue_wait_seconds", "Request to start of load.", buckets=_SECONDS
        )
        self.load_time = made(
            Histogram, "load_seconds", "Start of load to staged.", "source", buckets=_SECONDS
        )
        self.bytes = made(Gauge, "bytes", "Bytes in use.", "tier")
        self.unfinished = made(Gauge, "unfinished_loads", "Unfinished loads.")
