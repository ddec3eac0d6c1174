"""The console's server pages: models in training, and for operators residency, queues and costs."""

import collections
import math

from mint_jax.catalog.records import names
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError
from mint_jax.service.console.pages import Page, Visit, place_of, url_of
from mint_jax.service.costs import KINDS
from mint_jax.service.monitoring import state_of
from mint_jax.service.queries import PageQuery
from mint_jax.service.server import Server

MODELS = 50  # of a page
RESIDENT = 50  # revisions on the device that are named
COSTS = 50  # policies and tenants whose costs are shown
QUANTILES = (0.5, 0.95, 0.99)


class Operations:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server = server

    def training(self, visit: Visit) -> Page:
        """Shows a page of the tenant's models, newest first."""
        book, offset = self.server.book, visit.fields(PageQuery).offset
        count = book.count_models(visit.tenant)
        models = [
            (model, url_of(names.full_name(model.tenant, model.id)), place_of(self.server, model))
            for model in book.models(visit.tenant, MODELS, offset)
        ]
        values = {
            "models": models,
            "count": count,
            "offset": offset,
            "before": max(0, offset - MODELS),
            "next": offset + MODELS if offset + MODELS < count else 0,
        }
        return Page("training.html", values)

    def costs(self, visit: Visit) -> Page:
        """Shows the policies and tenants with the highest costs; operators see all tenants."""
        listed = self.server.costs.listed
        tables = {"policy": list(listed("policy", visit.owner, COSTS, 0).items())}
        if visit.owner is None:
            tables = {"tenant": list(listed("tenant", None, COSTS, 0).items())} | tables
        return Page("costs.html", {"tables": tables, "kinds": KINDS, "most": COSTS})

    def state(self, visit: Visit) -> Page:
        """Shows residency and queues of all tenants."""
        server = self.server
        state, gaps = state_of(server), sorted(server.durable.gaps)
        residency = state["residency"]
        costs = {tenant: cost.seconds for tenant, cost in server.costs.since_start().items()}
        values = {
            "state": state,
            "ready": not state["trouble"],
            "unfinished": server.engine.in_flight().total(),
            "gaps": [(f"{q:.0%}", gaps[math.ceil(q * len(gaps)) - 1]) for q in QUANTILES if gaps],
            "bound": server.sizes.gap_s,
            "places": collections.Counter(server.live.places()),
            "training_slots": sorted(server.sizes.slots.items()),
            "slots": sorted(residency["slots"].items()),
            "host": residency["host"],
            "loads": residency["loads"],
            "device_bytes": residency["device_bytes"],
            "resident": [self._named(digest) for digest in residency["resident"][:RESIDENT]],
            "more": max(0, len(residency["resident"]) - RESIDENT),
            "served": sorted(costs.items(), key=lambda one: -one[1]),
            "served_s": sum(costs.values()),
        }
        return Page("server_state.html" if visit.part else "server.html", values)

    def _named(self, digest: str) -> tuple[str, str, str]:
        """Returns digest, name and page of a revision; an adapter outside the catalog has its
        loaded names and no page.
        """
        try:
            found = self.server.catalog.resolve(digest)
        except DatabaseFailed:
            raise
        except UserError:
            loaded = [name for name in self.server.weights.names_of(digest) if name != digest]
            return digest, ", ".join(loaded), ""
        return digest, f"{found.policy}@{found.number}", url_of(found.policy)
