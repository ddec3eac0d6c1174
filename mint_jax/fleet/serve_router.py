"""The fleet's chooser as a request router of Ray Serve, for deployments that multiplex adapters:

    RequestRouterConfig(
        request_router_class="mint_jax.fleet.serve_router:RevisionRouter",
        request_routing_stats_period_s=1.0,
    )

A request's ``multiplexed_model_id`` is the digest of its revision; the bare base has none. A
replica's ``record_routing_stats`` returns fields of ``EngineReport``, at least ``rows``, ``slots``,
and ``load_s`` if it is known.
"""

import contextlib
import itertools
import math
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mint_jax.fleet.engine import EngineReport
from mint_jax.fleet.view import FleetEngine, FleetView


async def _reports_to_serve(*_: object) -> Any:
    raise AssertionError("Ray Serve asks replicas for their reports, and moves no sessions")


class RevisionRouter(RequestRouter):
    """Offers each request to the replicas in the order of ``chooser.choose``."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._numbers = itertools.count()
        self._view = FleetView([])
        self._sent: dict[str, contextlib.ExitStack] = {}  # requests in flight

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes the replicas that there are now, and what they last reported."""
        known, members = self._view.members, {}
        for replica in replicas:
            name = replica.replica_id.unique_id
            nothing = FleetEngine(name, _reports_to_serve, lambda digest: None, _reports_to_serve)
            member = members[name] = known.get(name, nothing)
            report = EngineReport(serving=True)._replace(**replica.routing_stats)
            if report != member.report:
                # Ray Serve says when a report changes, and when a replica is gone: it is never old.
                member.take(report, math.inf)
        self._view.members = members
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns the replicas, the one to offer first at the head. There the request counts as in
        flight from now on: of a burst, no later choice would see it otherwise.
        """
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        key = _key(pending_request) if pending_request else None
        order = [one.engine for one in self._view.choices(key, next(self._numbers))]
        if order and pending_request:
            self._count(pending_request, order[0])
            id = pending_request.metadata.internal_request_id
            pending_request.future.add_done_callback(lambda f: f.cancelled() and self._forget(id))
        return [[replicas[name]] for name in order if name in replicas]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Counts a request where it is."""
        self._count(pending_request, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts it no more."""
        self._forget(internal_request_id)

    def _count(self, request: PendingRequest, name: str) -> None:
        id = request.metadata.internal_request_id
        self._forget(id)
        if member := self._view.members.get(name):
            stack = self._sent[id] = contextlib.ExitStack()
            stack.enter_context(self._view.sending(member, _key(request)))

    def _forget(self, id: str) -> None:
        if stack := self._sent.pop(id, None):
            stack.close()


def _key(request: PendingRequest) -> str | None:
    return request.metadata.multiplexed_model_id or None
