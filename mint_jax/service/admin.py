"""Costs for operators: ``/admin/costs``, and counters for Prometheus."""

import dataclasses
import json
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mint_jax.errors import UserError
from mint_jax.service.costs import COUNTED, KINDS, Costs
from mint_jax.service.queries import CostsQuery, query_of


class CostMetrics(Collector):
    """Seconds and tokens since the process started, by tenant and kind.

    There may be a million policies: for these see ``/admin/costs``.
    """

    def __init__(self, costs: Costs):
        self._costs = costs

    def collect(self) -> Iterable[CounterMetricFamily]:
        labels = ["tenant", "kind"]
        seconds = CounterMetricFamily(
            "mint_device_seconds",
            "Device seconds by tenant and kind of work.",
            labels=labels,
        )
        tokens = CounterMetricFamily(
            "mint_device_tokens", "Tokens processed in these seconds.", labels=labels
        )
        for tenant, cost in sorted(self._costs.since_start().items()):
            told = dataclasses.asdict(cost)
            for kind in KINDS:
                seconds.add_metric([tenant, kind], told[f"{kind}_s"])
            for kind in COUNTED:
                tokens.add_metric([tenant, kind], told[f"{kind}_tokens"])
        yield from (seconds, tokens)


def routes(costs: Costs) -> list[Route]:
    """``GET /admin/costs?by=policy|tenant&tenant=T&limit=N&offset=N``: total
    costs, highest first.
    """

    async def listed(request: Request) -> Response:
        query = query_of(CostsQuery, request)
        if query.by == "tenant" and query.tenant is not None:
            raise UserError("tenant is given with by=tenant: leave one of them out")
        found = await run_in_threadpool(
            lambda: costs.listed(query.by, query.tenant, query.limit + 1, query.offset)
        )
        page = [{query.by: name} | cost.told() for name, cost in found.items()]
        listed = {"costs": page[: query.limit], "has_more": len(page) > query.limit}
        return Response(json.dumps(listed) + "\n", media_type="application/json")

    return [Route("/admin/costs", listed, methods=["GET"])]
