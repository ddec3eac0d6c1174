"""The model ``auto``: each prompt is answered by a policy that suits it, or by the bare base.

Candidates are the policies whose example prompts are nearest to the prompt (``routing/index.py``).
The tenant's bandit draws one of them by expected reward and by the time until it could start
(``routing/bandit.py``). A draw is on the disk before the answer is sampled, and a reward with what
was learned from it before it is acknowledged.
"""

import collections
import json
import logging
import random
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.records.names import parse_policy
from mint_jax.errors import UserError
from mint_jax.residency.residency import Residency
from mint_jax.routing.bandit import Arm, Bandit, Option
from mint_jax.routing.index import Near, RouteIndex
from mint_jax.service.canaries import KEEP_S, key_of
from mint_jax.service.checkpoints import found_or_none
from mint_jax.service.server_db import Connection, Overloaded, ServerDatabase
from mint_jax.service.validation import BadRequest
from mint_jax.service.weights import Model

log = logging.getLogger("mint_jax.service")
AUTO = "auto"
BASE = "base"  # key of the base among the arms; a policy's full name has a stroke
CANDIDATES = 8
PAGE = 10_000  # descriptions that are read at once
OVERLAP_S = 10.0  # changes may become visible after later ones


class RouteOption(NamedTuple):
    """An option and the model that answers if it is drawn."""

    option: Option
    model: Model


class Routes:
    """Descriptions, draws and rewards of one server; may be called from any thread.

    Args:
        base: names of the base, and its fingerprint.
        dims: of a prompt's vector.
        cost: reward that a second of waiting costs.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        database: ServerDatabase,
        catalog: Catalog,
        residency: Residency,
        base: tuple[str, str],
        dims: int,
        cost: float,
        clock: Callable[[], float],
    ):
        self._database, self._catalog, self._residency = database, catalog, residency
        (self._name, self._fingerprint), self._dims = base, dims
        self._cost, self._clock = cost, clock
        self._indexes: dict[str, RouteIndex] = collections.defaultdict(lambda: RouteIndex(dims))
        self._bandits: dict[str, Bandit] = {}
        self._lock = threading.Lock()  # of both, and of what is learned
        self._place = 0.0, 0

    def refresh(self) -> None:
        """Reads the descriptions that have changed, and forgets old draws."""
        at, _ = self._place
        place = max(0.0, at - OVERLAP_S), 0
        while True:
            found, after = self._catalog.descriptions(since=place, limit=PAGE)
            own = [one for one in found if one.base == self._fingerprint]
            by_tenant = collections.defaultdict(list)
            for one in own:
                by_tenant[parse_policy(one.policy)[0]].append(one)
            with self._lock:
                for tenant, some in by_tenant.items():
                    index = self._indexes[tenant]
                    here = [one for one in some if one.vector.size == self._dims]
                    for one in some:
                        index.remove(one.policy)
                    vectors = np.array([one.vector for one in here]).reshape(-1, self._dims)
                    index.put([one.policy for one in here], vectors)
            self._place = max(self._place, after)
            if len(found) < PAGE:
                break
            place = after
        before = self._clock() - KEEP_S
        if self._database.read("SELECT 1 FROM choices WHERE created < ? LIMIT 1", before):
            query = "DELETE FROM choices WHERE created < ?"
            self._database.write(lambda c: c.execute(query, (before,)).rowcount).result()

    def options(
        self, tenant: str, vector: np.ndarray, budget_s: float | None = None
    ) -> list[RouteOption]:
        """Returns what a prompt of this vector may go to, with probabilities: at most
        ``CANDIDATES`` policies that could start within ``budget_s`` seconds, and the base.
        """
        arms, models = [Arm(BASE, None, 0.0)], [Model(self._name)]
        near: list[Near] = []  # of a base that overflows: the base alone
        if np.isfinite(vector).all():
            with self._lock:
                near = self._indexes[tenant].nearest(vector, CANDIDATES)
        for policy, cosine in near:
            names = f"{policy}@serving", policy  # its newest revision, without that alias
            resolved = (found_or_none(self._catalog.resolve, name) for name in names)
            found = next(filter(None, resolved), None)
            if found is None:  # it is retired, or has no revision
                with self._lock:
                    self._indexes[tenant].remove(policy)
                continue
            eta_s = self._residency.eta_s(found.digest)
            if budget_s is None or eta_s <= budget_s:
                arms.append(Arm(policy, cosine, eta_s))
                name = f"{found.policy}@{found.number}"
                models.append(Model(name, found.digest, found.policy, found.number, found.canary))
        with self._lock:
            options = self._bandit(tenant).options(arms)
        return [RouteOption(*one) for one in zip(options, models)]

    def choose(
        self, tenant: str, vector: np.ndarray, key: str, budget_s: float | None = None
    ) -> Model:
        """Returns the model that answers the request of this key; the same for the same key."""
        routes = self.options(tenant, vector, budget_s)
        with self._lock:
            bandit = self._bandit(tenant)
            features = bandit.features([route.option.arm for route in routes])
            drawn = bandit.draw([r.option for r in routes], random.Random(key).random())
        at = next(i for i, route in enumerate(routes) if route.option is drawn)
        row = (tenant, key, drawn.arm.key, drawn.propensity, json.dumps(features[at].tolist()))
        query = "INSERT OR REPLACE INTO choices VALUES (?, ?, ?, ?, ?, ?, NULL)"
        change = (*row, self._clock())
        try:
            self._database.write(lambda c: c.execute(query, change).rowcount, len(key)).result()
        except (DatabaseFailed, Overloaded) as error:
            log.warning("an answer of auto takes no reward: %s", error)
        return routes[at].model

    def feedback(self, tenant: str, id: str, reward: float, repeated: bool = False) -> bool:
        """Learns from the reward of an answer; returns whether it was an answer of ``auto``. Raises
        ``BadRequest`` if it has a reward already; nothing is learned from it again if ``repeated``,
        since a write that followed may have failed.
        """
        key = key_of(id)
        query = "SELECT policy, features, reward FROM choices WHERE tenant = ? AND id = ?"
        with self._lock:
            if not (rows := self._database.read(query, tenant, key)):
                return False
            policy, features, before = rows[0]
            if before is not None and repeated:
                return True
            if before is not None:
                text = f"answer {id[:100]!r} has the reward {before}: an answer has one"
                raise BadRequest("id", text)
            bandit = self._bandit(tenant)
            bandit.learn(policy, np.array(json.loads(features)), reward)
            moments = json.dumps(bandit.arms[policy].tolist())

            def write(connection: Connection) -> None:
                own = "UPDATE choices SET reward = ? WHERE tenant = ? AND id = ?"
                connection.execute(own, (reward, tenant, key))
                values = (tenant, policy, moments)
                connection.execute("INSERT OR REPLACE INTO arms VALUES (?, ?, ?)", values)

            try:
                self._database.write(write, len(id)).result()
            except BaseException:
                self._bandits.pop(tenant)  # it has learned what is not on the disk
                raise
        return True

    def _bandit(self, tenant: str) -> Bandit:
        """Returns a tenant's bandit, as it is on the disk; called with the lock."""
        if (bandit := self._bandits.get(tenant)) is None:
            bandit = self._bandits[tenant] = Bandit(self._cost)
            query = "SELECT policy, moments FROM arms WHERE tenant = ?"
            for policy, moments in self._database.read(query, tenant):
                bandit.put(policy, np.array(json.loads(moments)))
        return bandit


def need(routes: Routes | None) -> Routes:
    """Returns the routes of a server that has some."""
    if routes is None:
        raise UserError("this server does not route: start it with --config.routing=True")
    return routes
