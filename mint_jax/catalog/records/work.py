"""What work leaves beside revisions: checkpoints, rollouts, scores, and clients' operations.

Training is resumed from checkpoints, and learned from rollouts. A checkpoint's bytes are Orbax's
(``mint_jax.checkpoint``); the catalog records where they lie. A rollout object is a payload like a
revision's.

A score is of one revision's bytes on one base. It was computed twice, with the revision loaded
alone and in a batch with other revisions, as serving does; where the two differ the score says
nothing about what is served, and is refused.

Operations are client calls that outlive their connection. A key makes a retry the same operation;
its id can be polled. Their table is its own log: it records who asked for what and when, and how it
ended.
"""

import dataclasses
import json
import math
import uuid
from typing import Any

import numpy as np
import sqlalchemy as sa

from mint_jax.catalog.packed import Buffer, digest_of
from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import insert_new
from mint_jax.catalog.records.lookup import Lookup
from mint_jax.catalog.records.names import DEFAULT_TENANT, clean, full_name, note, whole
from mint_jax.catalog.records.payload_rows import add_payloads, store_and_commit
from mint_jax.catalog.records.policies import lock, touch
from mint_jax.catalog.records.revisions import find_revision
from mint_jax.catalog.records.sessions import Session, check_writer
from mint_jax.catalog.records.tables import (
    checkpoints,
    evaluations,
    operations,
    revisions,
    rollouts,
)
from mint_jax.catalog.records.tables import policies as policy_table
from mint_jax.catalog.storage.payloads import Place
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class TrainingCheckpoint:
    """Where the state that resumes training lies."""

    id: int
    policy: str
    step: int
    place: str
    created_at: float


@dataclasses.dataclass(frozen=True)
class RolloutRecord:
    """A stored batch of rollouts; ``digest`` names its object, which records the revision of every
    token.
    """

    id: int
    policy: str
    step: int
    digest: str
    tokens: int
    mean_reward: float
    created_at: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A score and everything that produced it. ``policy`` and ``number`` are None once retention
    removed the revision.
    """

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


@dataclasses.dataclass(frozen=True)
class Operation:
    """One client call. ``state``: ``running``, ``done`` (with ``result``) or ``failed`` (with
    ``error``).
    """

    id: str
    tenant: str
    kind: str
    key: str
    state: str
    request: Any
    result: Any
    error: str | None
    created_at: float
    finished_at: float | None


class Work(Lookup):
    """Records what jobs and clients did."""

    def checkpoint(
        self,
        policy: str,
        step: int,
        place: str,
        *,
        session: Session | None = None,
        keep: int | None = None,
        by: str | None = None,
        why: str = "",
    ) -> TrainingCheckpoint:
        """Notes that a training checkpoint is committed at ``place``.

        Args:
            keep: the records of all but this many newest checkpoints are forgotten, as their files
                are.
        """

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> TrainingCheckpoint:
            check_writer(row, session)
            if keep is not None and whole("keep", keep) < 1:
                raise UserError(
                    f"keep is {keep}; expected of how many checkpoints the records stay, at least 1"
                )
            at = max(author.now, row.touched_at)
            values = {
                "policy_id": row.id,
                "step": whole("step", step),
                "place": note("place", place),
                "created_at": at,
            }
            number = connection.scalar(checkpoints.insert().returning(checkpoints.c.id), values)
            touch(connection, author, row)
            details: dict[str, Any] = {"step": step, "place": place}
            if keep is not None:
                older = (
                    sa.select(checkpoints.c.id)
                    .where(checkpoints.c.policy_id == row.id)
                    .order_by(checkpoints.c.id.desc())
                )
                if gone := list(connection.scalars(older.offset(keep))):
                    connection.execute(checkpoints.delete().where(checkpoints.c.id.in_(gone)))
                    details["forgotten"] = len(gone)
            audit.append(connection, audit.row(author, "checkpoint", row, details))
            return _checkpoint(row, number, values)

        return self._change(policy, body, by, why, active=True)

    def checkpoints(self, policy: str, limit: int = 100) -> list[TrainingCheckpoint]:
        """A policy's checkpoints, the newest first."""

        def body(connection: sa.Connection, row: sa.Row) -> list[TrainingCheckpoint]:
            query = (
                sa.select(checkpoints)
                .where(checkpoints.c.policy_id == row.id)
                .order_by(checkpoints.c.id.desc())
                .limit(limit)
            )
            return [
                _checkpoint(row, found.id, found._mapping) for found in connection.execute(query)
            ]

        return self._look(policy, body)

    def rollout(
        self,
        policy: str,
        step: int,
        data: Buffer,
        *,
        tokens: int,
        mean_reward: float,
        session: Session | None = None,
        by: str | None = None,
        why: str = "",
    ) -> RolloutRecord:
        """Stores a rollout object: tokens, logprobs, rewards and the revision of each token."""
        key, author = names.parse_policy(policy), self._author(by, why)
        digest = bytes.fromhex(digest_of(data))

        def body(connection: sa.Connection, places: dict[bytes, Place]) -> RolloutRecord:
            row = lock(connection, *key, active=True)
            add_payloads(connection, author, {digest: None}, places)
            check_writer(row, session)
            if not math.isfinite(mean_reward):
                raise UserError(
                    f"mean_reward of a rollout of {full_name(*key)!r} is {mean_reward}: give a"
                    " finite number"
                )
            values = {
                "policy_id": row.id,
                "step": whole("step", step),
                "digest": digest,
                "tokens": whole("tokens", tokens),
                "mean_reward": float(mean_reward),
                "created_at": max(author.now, row.touched_at),
            }
            number = connection.scalar(rollouts.insert().returning(rollouts.c.id), values)
            touch(connection, author, row)
            audit.append(
                connection,
                audit.row(author, "rollout", row, {"step": step, "digest": digest.hex()}),
            )
            return _rollout(row, number, values)

        return store_and_commit(self.database, self.store, {digest: data}, body)

    def rollouts(self, policy: str, limit: int = 100) -> list[RolloutRecord]:
        """A policy's rollout records, the newest first; ``read_rollout`` gives the bytes."""

        def body(connection: sa.Connection, row: sa.Row) -> list[RolloutRecord]:
            query = (
                sa.select(rollouts)
                .where(rollouts.c.policy_id == row.id)
                .order_by(rollouts.c.id.desc())
                .limit(limit)
            )
            return [_rollout(row, found.id, found._mapping) for found in connection.execute(query)]

        return self._look(policy, body)

    def read_rollout(self, record: RolloutRecord) -> np.ndarray:
        """The rollout object, ``uint8``, read-only, its digest verified."""
        return self._payload(record.digest)

    def drop_rollouts(
        self, policy: str, before_step: int, *, by: str | None = None, why: str = ""
    ) -> int:
        """Forgets rollouts of earlier steps; ``gc`` then frees their bytes."""

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> int:
            earlier = rollouts.delete().where(
                rollouts.c.policy_id == row.id, rollouts.c.step < before_step
            )
            if dropped := connection.execute(earlier).rowcount:
                touch(connection, author, row)
                audit.append(
                    connection,
                    audit.row(
                        author,
                        "drop rollouts",
                        row,
                        {"before_step": before_step, "rollouts": dropped},
                    ),
                )
            return dropped

        return self._change(policy, body, by, why)

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
        if not (
            math.isfinite(isolated)
            and math.isfinite(shared)
            and abs(isolated - shared) <= tolerance
        ):
            raise UserError(
                f"score of {named} is {isolated} loaded alone and {shared} in a shared batch; they"
                f" may differ by {tolerance}: find which of the two serves other bytes before"
                " recording it"
            )
        try:
            text = json.dumps(metrics, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"metrics of {named} are not JSON ({error}): give finite numbers and text"
            ) from None
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
            about = {
                "revision_id": scored.id,
                "digest": scored.digest,
                "base": row.base,
                "created_at": max(author.now, row.touched_at),
            }
            number = connection.scalar(
                evaluations.insert().returning(evaluations.c.id), {**values, **about}
            )
            touch(connection, author, row)
            details = {
                "digest": scored.digest.hex(),
                "evaluation": number,
                "scorer": scorer,
                "score": isolated,
            }
            audit.append(
                connection, audit.row(author, "evaluate", row, details, before=scored.number)
            )
            return _listing(connection, evaluations.c.id == number, 1)[0]

        return self._change(found.policy, body, by, why)

    def evaluations(self, name: str, limit: int = 1000) -> list[Evaluation]:
        """Scores of a policy (``policy``), or of the bytes of one revision (``policy@…``, digest),
        whichever policy they are of.
        """
        if "@" in name or names.is_digest(name):
            return self.evaluations_of(self.resolve(name).digest, limit)
        return self._look(name, lambda c, row: _listing(c, revisions.c.policy_id == row.id, limit))

    def evaluations_of(self, digest: str, limit: int = 1000) -> list[Evaluation]:
        """Scores of the bytes with this digest, also where their revision is retired or removed."""
        return self.database.read(
            lambda c: _listing(c, evaluations.c.digest == bytes.fromhex(digest), limit)
        )

    def begin_operation(
        self, kind: str, key: str, request: Any = None, tenant: str = DEFAULT_TENANT
    ) -> tuple[Operation, bool]:
        """The operation of a key, and whether this call began it; a retry finds the first one, with
        its result if it has one.

        Raises:
            UserError: the key was used for another request.
        """
        row = {
            "id": uuid.uuid4().hex,
            "tenant": clean("tenant", tenant),
            "kind": note("operation kind", kind, 400),
            "key": note("operation key", key, 400),
            "state": "running",
            "request": _json("request", request),
            "result": None,
            "error": None,
            "created_at": self._clock(),
            "finished_at": None,
        }

        def body(connection: sa.Connection) -> tuple[Operation, bool]:
            insert_new(connection, operations, [row])
            found = connection.execute(
                sa.select(operations).where(
                    operations.c.tenant == row["tenant"], operations.c.key == key
                )
            ).one()
            if (found.kind, found.request) != (kind, row["request"]):
                raise UserError(
                    f"operation key {key[:80]!r} was used for another request of kind"
                    f" {found.kind!r}: choose a fresh key"
                )
            return _operation(found), found.id == row["id"]

        return self.database.write(body)

    def finish_operation(self, id: str, result: Any = None, error: str | None = None) -> Operation:
        """Writes how an operation ended. Saying the same again is fine.

        Raises:
            UserError: no such operation, or it ended otherwise.
        """
        state, now = "done" if error is None else "failed", self._clock()
        text = _json("result", result) if error is None else None
        if error is not None:
            note("error", error, 100_000)

        def body(connection: sa.Connection) -> Operation:
            found = connection.execute(
                sa.select(operations).where(operations.c.id == id).with_for_update()
            ).first()
            if found is None:
                raise UserError(f"operation {id[:80]!r} does not exist: begin it first")
            if found.state == "running":
                values = {
                    "state": state,
                    "result": text,
                    "error": error,
                    "finished_at": max(now, found.created_at),
                }
                connection.execute(
                    operations.update().where(operations.c.id == id).values(**values)
                )
            elif (found.state, found.result, found.error) != (state, text, error):
                raise UserError(
                    f"operation {id!r} has ended already as {found.state}: its end cannot be"
                    " changed"
                )
            return _get(connection, id)

        return self.database.write(body)

    def operation(self, id: str) -> Operation:
        """An operation by its id."""
        return self.database.read(lambda c: _get(c, id))


def _checkpoint(policy: sa.Row, number: Any, values: Any) -> TrainingCheckpoint:
    return TrainingCheckpoint(
        number,
        full_name(policy.tenant, policy.name),
        values["step"],
        values["place"],
        values["created_at"],
    )


def _rollout(policy: sa.Row, number: Any, values: Any) -> RolloutRecord:
    mine, digest = full_name(policy.tenant, policy.name), values["digest"].hex()
    return RolloutRecord(
        number,
        mine,
        values["step"],
        digest,
        values["tokens"],
        values["mean_reward"],
        values["created_at"],
    )


def _listing(
    connection: sa.Connection, condition: sa.ColumnElement[bool], limit: int
) -> list[Evaluation]:
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
        for row in connection.execute(
            query.where(condition).order_by(evaluations.c.id).limit(limit)
        )
    ]


def _get(connection: sa.Connection, id: str) -> Operation:
    found = connection.execute(sa.select(operations).where(operations.c.id == id)).first()
    if found is None:
        raise UserError(f"operation {id[:80]!r} does not exist or was removed after it ended")
    return _operation(found)


def remove_ended(connection: sa.Connection, before: float) -> int:
    """Forgets operations that ended before a time."""
    return connection.execute(operations.delete().where(operations.c.finished_at < before)).rowcount


def _json(what: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{what} of an operation is not JSON ({error}): give plain values"
        ) from None


def _operation(row: sa.Row) -> Operation:
    result = None if row.result is None else json.loads(row.result)
    return Operation(
        row.id,
        row.tenant,
        row.kind,
        row.key,
        row.state,
        json.loads(row.request),
        result,
        row.error,
        row.created_at,
        row.finished_at,
    )
