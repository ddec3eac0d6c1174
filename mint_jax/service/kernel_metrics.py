"""Kernels of this platform that were skipped while programs were traced, for Prometheus."""

import collections
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from pallas_kernels import dispatch


class KernelMetrics(Collector):
    """``mint_kernels_passed_over_total`` by op, implementation and reason: calls of programs that
    were traced since the process began.
    """

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(
            "mint_kernels_passed_over",
            "Calls in traced programs that another form serves.",
            labels=["op", "implementation", "reason"],
        )
        for one in dispatch.passed_over(collections.Counter(), dispatch.platform_here()):
            family.add_metric([one["op"], one["implementation"], one["reason"]], one["times"])
        yield family
