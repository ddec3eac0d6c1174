"""Residency's metrics for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters, gauges and histograms of one residency.

    Args:
        registry: registry of the metrics; None registers them nowhere.

    Attributes:
        hits, misses: by tier, ``device`` (a request found its slot) and ``host`` (a load found the
            packed bytes).
        joined: requests that joined an unfinished load.
        queue_wait: seconds from a request to the start of its load.
        load_time: seconds from that start until the adapter can be written to its slot, by source:
            ``storage`` or ``host``.
        bytes: bytes in use, by tier.
        evictions: by tier.
        refusals: by reason: ``queue_full``, ``prefetch_dropped``, ``failed``.
        uncached: loads whose packed bytes the host cache could not store.
        unfinished: unfinished loads.
    """

    def __init__(self, registry: CollectorRegistry | None = None):
        def name(what: str) -> str:
            return f"mint_residency_{what}"

        self.hits = Counter(name("hits"), "Found in a tier.", ["tier"], registry=registry)
        self.misses = Counter(name("misses"), "Not found in a tier.", ["tier"], registry=registry)
        self.joined = Counter(
            name("joined"), "Requests that joined an unfinished load.", registry=registry
        )
        self.queue_wait = Histogram(
            name("queue_wait_seconds"),
            "Request to start of load.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.load_time = Histogram(
            name("load_seconds"),
            "Start of load to staged.",
            ["source"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.bytes = Gauge(name("bytes"), "Bytes in use.", ["tier"], registry=registry)
        self.evictions = Counter(
            name("evictions"), "Copies that were evicted.", ["tier"], registry=registry
        )
        self.refusals = Counter(
            name("refusals"), "Loads refused, dropped or failed.", ["reason"], registry=registry
        )
        self.uncached = Counter(
            name("uncached"), "Loads that the host cache could not store.", registry=registry
        )
        self.unfinished = Gauge(name("unfinished_loads"), "Unfinished loads.", registry=registry)
