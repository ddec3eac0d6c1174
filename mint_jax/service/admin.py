"""What operators ask of costs: ``/admin/costs`` in pages, and the series that Prometheus counts."""

import dataclasses
import json
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mint_jax.errors import UserError, choice
from mint_jax.service.costs import COUNTED, KINDS, Costs

MOST_LISTED = 1000


class CostMetrics(Collector):
    """Seconds and tokens since the process began, by tenant and kind. Of policies there may be a
    million: see ``/admin/costs``.
    """

    def __init__(self, costs: Costs):
        self._costs = costs

    def collect(self) -> Iterable[CounterMetricFamily]:
        labels = ["tenant", "kind"]
        seconds = CounterMetricFamily(
            "mint_device_seconds",
            "Seconds of the devices, by who asked and what for.",
            labels=labels,
        )
        tokens = CounterMetricFamily(
            "mint_device_tokens", "Tokens that these served.", labels=labels
        )
        for tenant, cost in sorted(self._costs.since_start().items()):
            told = dataclasses.asdict(cost)
            for kind in KINDS:
                seconds.add_metric([tenant, kind], told[f"{kind}_s"])
            for kind in COUNTED:
                tokens.add_metric([tenant, kind], told[f"{kind}_tokens"])
        yield from (seconds, tokens)


def routes(costs: Costs) -> list[Route]:
    """``GET /admin/costs?by=policy|tenant&tenant=T&limit=N&offset=N``: what each has cost since
    ever, the dearest first.
    """

    async def listed(request: Request) -> Response:
        asked = request.query_params
        by, tenant = asked.get("by", "policy"), asked.get("tenant")
        if by not in ("policy", "tenant"):
            raise choice("by", by[:80], ("policy", "tenant"))
        if by == "tenant" and tenant is not None:
            raise UserError("tenant is given with by=tenant: leave one of them out")
        limit, offset = (
            _number("limit", asked.get("limit", "100"), 1, MOST_LISTED),
            _number("offset", asked.get("offset", "0"), 0, 10**9),
        )
        found = await run_in_threadpool(lambda: costs.listed(by, tenant, limit + 1, offset))
        page = [{by: name} | cost.told() for name, cost in found.items()]
        told = {"costs": page[:limit], "has_more": len(page) > limit}
        return Response(json.dumps(told) + "\n", media_type="application/json")

    return [Route("/admin/costs", listed, methods=["GET"])]


def _number(name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise UserError(f"{name} is {text[:40]!r}; expected a whole number from {low} to {high}")
    return int(text)
