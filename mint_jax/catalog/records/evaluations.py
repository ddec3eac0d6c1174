"""Evaluations: a score, and everything that produced it.

A score is of one revision's bytes on one base. It was computed twice, with the revision loaded alone and in a batch with
other revisions, as serving does; where the two differ the score says nothing about what is served, and is refused.
"""

import dataclasses
import json
import math
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.lookup import Lookup
from mint_jax.catalog.records.names import full_name, note, whole
from mint_jax.catalog.records.policies import touch
from mint_jax.catalog.records.revisions import find_revision
from mint_jax.catalog.records.tables import evaluations, revisions
from mint_jax.catalog.records.tables import policies as policy_table
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A score and everything that produced it. ``policy`` and ``number`` are None once retention removed the revision."""

    id: int
    policy: str | None
    number: int | None
    digest: str
    base: str
    renderer: str
    scorer: str
    dataset: str
    seed: int
    metrics: dict[str, Any]
    isolated: float
    shared: float
    created_at: float


class Evaluations(Lookup):
    """Records scores."""

    def record_evaluation(
        self,
        revision: str,
        *,
        renderer: str,
        scorer: str,
        dataset: str,
        seed: int,
        metrics: dict[str, Any],
        isolated: float,
        shared: float,
        tolerance: float = 0.0,
        by: str | None = None,
        why: str = "",
    ) -> Evaluation:
        """Notes a score of a revision.

        Args:
            dataset: digest of the data.
            isolated, shared: the score with the revision loaded alone, and in a batch with others.
            tolerance: by how much the two may differ.

        Raises:
            UserError: they are not finite or differ by more, or ``metrics`` is not JSON.
        """
        found = self.resolve(revision)
        named = f"{found.policy}@{found.number}"
        isolated, shared = float(isolated), float(shared)
        if not (math.isfinite(isolated) and math.isfinite(shared) and abs(isolated - shared) <= tolerance):
            raise UserError(
                f"score of {named} is {isolated} loaded alone and {shared} in a shared batch; they may differ by {tolerance}: "
                "find which of the two serves other bytes before recording it"
            )
        try:
            text = json.dumps(metrics, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(f"metrics of {named} are not JSON ({error}): give finite numbers and text") from None
        values = {
            "renderer": note("renderer", renderer),
            "scorer": note("scorer", scorer),
            "dataset": note("dataset", dataset),
            "seed": whole("seed", seed, -(2**62)),
            "metrics": text,
            "isolated": isolated,
            "shared": shared,
        }

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> Evaluation:
            scored = find_revision(connection, row, found.number)
            about = {"revision_id": scored.id, "digest": scored.digest, "base": row.base, "created_at": max(author.now, row.touched_at)}
            number = connection.scalar(evaluations.insert().returning(evaluations.c.id), {**values, **about})
            touch(connection, author, row)
            details = {"digest": scored.digest.hex(), "evaluation": number, "scorer": scorer, "score": isolated}
            audit.append(connection, audit.row(author, "evaluate", row, details, before=scored.number))
            return _listing(connection, evaluations.c.id == number, 1)[0]

        return self._change(found.policy, body, by, why)

    def evaluations(self, name: str, limit: int = 1000) -> list[Evaluation]:
        """Scores of a policy (``policy``), or of the bytes of one revision (``policy@…``, digest), whichever policy they are of."""
        if "@" in name or names.is_digest(name):
            return self.evaluations_of(self.resolve(name).digest, limit)
        return self._look(name, lambda c, row: _listing(c, revisions.c.policy_id == row.id, limit))

    def evaluations_of(self, digest: str, limit: int = 1000) -> list[Evaluation]:
        """Scores of the bytes with this digest, also where their revision is retired or removed."""
        return self.database.read(lambda c: _listing(c, evaluations.c.digest == bytes.fromhex(digest), limit))


def _listing(connection: sa.Connection, condition: sa.ColumnElement[bool], limit: int) -> list[Evaluation]:
    """Evaluations that meet a condition, in order."""
    query = sa.select(evaluations, revisions.c.number, policy_table.c.tenant, policy_table.c.name)
    query = query.outerjoin(revisions, evaluations.c.revision_id == revisions.c.id)
    query = query.outerjoin(policy_table, revisions.c.policy_id == policy_table.c.id)
    return [
        Evaluation(
            row.id,
            None if row.tenant is None else full_name(row.tenant, row.name),
            row.number,
            row.digest.hex(),
            row.base,
            row.renderer,
            row.scorer,
            row.dataset,
            row.seed,
            json.loads(row.metrics),
            row.isolated,
            row.shared,
            row.created_at,
        )
        for row in connection.execute(query.where(condition).order_by(evaluations.c.id).limit(limit))
    ]
