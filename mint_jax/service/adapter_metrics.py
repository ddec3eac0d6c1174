"""Locations of adapters under vLLM's metric names, for routers that send requests to where their
adapter is loaded.
"""

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mint_jax.residency.residency import Residency


class AdapterMetrics(Collector):
    """``vllm:lora_requests_info``: its labels name adapters, its value is the time, seconds since
    1970.

    An adapter counts as running while it is in a slot, for then no request waits for it, and as
    waiting while it is loaded.

    Args:
        names_of: the names by which requests ask for a digest: see ``Weights.names_of``.
    """

    def __init__(self, residency: Residency, names_of: Callable[[str], Iterable[str]]):
        self._residency, self._names_of = residency, names_of

    def collect(self) -> Iterable[GaugeMetricFamily]:
        labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in slots, adapters on their way, and slots.",
            labels=labels,
        )
        resident = self._residency.state()["resident"]
        waiting = sorted(set(self._residency.loads.digests()) - set(resident))
        slots = sum(self._residency.table.capacities.values())
        family.add_metric([self._joined(resident), self._joined(waiting), str(slots)], time.time())
        yield family

    def _joined(self, digests: Iterable[str]) -> str:
        return ",".join(name for digest in digests for name in self._names_of(digest))
