"""Canaries of one server: which arm answers, what was drawn with which probability, and rewards.

A draw depends on the canary and on the key in the answer's id alone, so it can be repeated. It is
on the disk before the answer is sampled, and a reward before it is acknowledged; the judge
(``Catalog.observe``) is given what the catalog has not counted yet, after a restart too.
"""

import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable

from mint_jax.catalog.evidence import ArmReward
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records.canaries import Canary
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError
from mint_jax.service.server_db import Connection, Overloaded, ServerDatabase
from mint_jax.service.validation import BadRequest
from mint_jax.service.weights import Model

log = logging.getLogger("mint_jax.service")
KEEP_S = 7 * 86400.0  # seconds for which an answer may get its reward
_NEW = """SELECT place, candidate, propensity, reward FROM rewards JOIN draws USING (tenant, id)
    WHERE canary = ? AND place > ? ORDER BY place"""


def uniform(canary: int, key: str) -> float:
    """Returns a number in [0, 1) that depends on a canary and the name of an answer."""
    text = f"{canary} {key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) / 2**56


def key_of(id: str) -> str:
    """Returns the key in an answer's id."""
    return id.removeprefix("chat").removeprefix("cmpl-").removeprefix("resp_")


class Canaries:
    """Draws and rewards of one server; may be called from any thread. ``clock``: seconds since
    1970.
    """

    def __init__(self, database: ServerDatabase, catalog: Catalog, clock: Callable[[], float]):
        self._database, self._catalog, self._clock = database, catalog, clock
        [[self._source]] = database.read("SELECT id FROM identity")
        self._judging = threading.Lock()
        self._counted: dict[int, int] = {}  # by canary: place of the last reward that was judged
        # canaries with rewards that may not have been judged
        self._behind = {id for (id,) in database.read("SELECT DISTINCT canary FROM draws")}

    def drawn(self, model: Model, tenant: str, key: str) -> Model:
        """Returns the model that answers the request of this key: the candidate with the canary's
        share as its probability. The draw is on the disk on return. Without an open canary, or
        where the draw cannot be written, the parent answers and there is no reward.
        """
        assert model.canary is not None, "its name has a canary"
        alone = dataclasses.replace(model, canary=None)
        if (found := self._catalog.canary(model.canary)).state != "open":
            return alone
        is_candidate = uniform(found.id, key) < found.share
        propensity = found.share if is_candidate else 1 - found.share
        row = (tenant, key, found.id, is_candidate, propensity, self._clock())
        insert = "INSERT OR IGNORE INTO draws VALUES (?, ?, ?, ?, ?, ?)"
        try:
            self._database.write(lambda c: c.execute(insert, row).rowcount, len(key)).result()
        except (DatabaseFailed, Overloaded) as error:
            log.warning("canary %s: an answer has no reward: %s", found.id, error)
            return alone
        if not is_candidate:
            return model
        return dataclasses.replace(model, digest=found.digest, number=found.candidate)

    def drew(self, tenant: str, id: str) -> bool:
        """Returns whether a canary drew the answer of this id."""
        query = "SELECT 1 FROM draws WHERE tenant = ? AND id = ?"
        return bool(self._database.read(query, tenant, key_of(id)))

    def feedback(self, tenant: str, id: str, reward: float) -> Canary | None:
        """Writes the reward of an answer, and judges. Returns the canary after that; None if the
        catalog could not be written: the reward is judged later.

        Raises:
            BadRequest: the answer is unknown, or has a reward already.
        """
        key = key_of(id)
        select = "SELECT canary, reward FROM draws LEFT JOIN rewards USING (tenant, id)"
        select += " WHERE tenant = ? AND id = ?"

        def insert(connection: Connection) -> int:
            own = connection.execute(select, (tenant, key)).fetchone()
            if own is None:
                text = "no canary and no auto drew it, another tenant asked, or it is a week old"
                raise BadRequest("id", f"answer {id[:100]!r} takes no reward: {text}", status=404)
            if own["reward"] is not None:
                text = f"answer {id[:100]!r} has the reward {own['reward']}: an answer has one"
                raise BadRequest("id", text)
            values = (tenant, key, reward)
            connection.execute("INSERT INTO rewards (tenant, id, reward) VALUES (?, ?, ?)", values)
            return own["canary"]

        canary = self._database.write(insert, len(id)).result()
        self._behind.add(canary)
        return self._judge(canary)

    def catch_up(self) -> None:
        """Judges what could not be judged, and forgets old answers."""
        for canary in tuple(self._behind):
            self._judge(canary)
        before = self._clock() - KEEP_S
        if self._database.read("SELECT 1 FROM draws WHERE created < ? LIMIT 1", before):
            query = "DELETE FROM draws WHERE created < ?"
            self._database.write(lambda c: c.execute(query, (before,)).rowcount).result()

    def _judge(self, canary: int) -> Canary | None:
        with self._judging:  # those who wait here are judged with the rewards of the next one
            self._behind.discard(canary)
            rows = self._database.read(_NEW, canary, self._counted.get(canary, 0))
            new = [(r[0], ArmReward(bool(r[1]), r[2], r[3])) for r in rows]
            try:
                found = self._catalog.observe(canary, self._source, new)
            except UserError as error:  # the catalog cannot be written, or has no such canary
                log.warning("canary %s was not judged: %s", canary, error)
                if isinstance(error, DatabaseFailed):
                    self._behind.add(canary)
                return None
            if new:
                self._counted[canary] = new[-1][0]
            return found
