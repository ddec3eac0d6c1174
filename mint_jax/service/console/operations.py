"""The console's server pages: models in training, and for operators residency, queues and costs."""

import collections
import math
from typing import Any

from mint_jax.catalog.records import names
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError
from mint_jax.service.console.pages import Asked, Page, url_of
from mint_jax.service.costs import KINDS
from mint_jax.service.monitoring import state_of
from mint_jax.service.server import Server

MODELS = 50  # of a page
RESIDENT = 50  # revisions on the device that are named
DEAREST = 50  # policies and tenants whose costs are shown
QUANTILES = (0.5, 0.95, 0.99)


class Operations:
    """The handlers over one server."""

    def __init__(self, server: Server):
        self.server = server

    def training(self, asked: Asked) -> Page:
        """A page of the tenant's models, the newest first."""
        told = asked.query.get("offset", "0")
        if not (told.isascii() and told.isdecimal() and len(told) < 16):
            raise UserError(f"offset is {told[:40]!r}; expected a number from 0")
        book, offset = self.server.book, int(told)
        models, count = book.models(asked.tenant, MODELS, offset), book.count_models(asked.tenant)
        values = {
            "models": [
                (model, url_of(names.full_name(asked.tenant, model.id)), self._place(model.id))
                for model in models
            ],
            "count": count,
            "offset": offset,
            "before": max(0, offset - MODELS),
            "next": offset + MODELS if offset + MODELS < count else 0,
        }
        return Page("training.html", values)

    def _place(self, model: str) -> str:
        try:
            return self.server.live.where(model)
        except UserError:
            return "ended"

    def costs(self, asked: Asked) -> Page:
        """Shows the policies and tenants with the highest costs; operators see all tenants."""
        costs, tenant = self.server.costs, None if asked.everything else asked.tenant
        tables = {"policy": list(costs.listed("policy", tenant, DEAREST, 0).items())}
        if asked.everything:
            tables = {"tenant": list(costs.listed("tenant", None, DEAREST, 0).items())} | tables
        return Page("costs.html", {"tables": tables, "kinds": KINDS, "most": DEAREST})

    def state(self, asked: Asked) -> Page:
        """Shows residency and queues of all tenants."""
        server = self.server
        state, places = state_of(server), collections.Counter(server.live.places())
        residency, gaps = state["residency"], sorted(server.loop.gaps)
        served = sorted(
            ((tenant, cost.seconds) for tenant, cost in server.costs.since_start().items()),
            key=lambda one: -one[1],
        )
        values: dict[str, Any] = {
            "state": state,
            "ready": not state["trouble"],
            "unfinished": server.engine.in_flight().total(),
            "gaps": (
                [(f"{q:.0%}", gaps[math.ceil(q * len(gaps)) - 1]) for q in QUANTILES]
                if gaps
                else []
            ),
            "bound": server.sizes.gap_s,
            "places": places,
            "training_slots": sorted(server.sizes.slots.items()),
            "slots": sorted(residency["slots"].items()),
            "host": residency["host"],
            "loads": residency["loads"],
            "device_bytes": residency["device_bytes"],
            "resident": [self._named(digest) for digest in residency["resident"][:RESIDENT]],
            "more": max(0, len(residency["resident"]) - RESIDENT),
            "served": served,
            "served_s": sum(seconds for _, seconds in served),
        }
        return Page("server_state.html" if asked.part else "server.html", values)

    def _named(self, digest: str) -> tuple[str, str, str]:
        """A revision's digest, name and page; of an adapter that is in no catalog its loaded
        names.
        """
        try:
            found = self.server.catalog.resolve(digest)
        except DatabaseFailed:
            raise
        except UserError:
            return (
                digest,
                ", ".join(name for name in self.server.weights.names_of(digest) if name != digest),
                "",
            )
        return digest, f"{found.policy}@{found.number}", url_of(found.policy)
