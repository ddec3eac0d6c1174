"""What training leaves beside revisions: checkpoints, which resume it, and rollouts, which it learned from.

A checkpoint's bytes are Orbax's (``mint_jax.checkpoint``); the catalog records where they lie. A rollout object is a payload
like a revision's.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import sqlalchemy as sa

from mint_jax.catalog.packed import Buffer, digest_of
from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.lookup import Lookup
from mint_jax.catalog.records.names import full_name, note, whole
from mint_jax.catalog.records.payload_rows import add_payloads, store_and_commit
from mint_jax.catalog.records.policies import lock, touch
from mint_jax.catalog.records.sessions import Session, check_writer
from mint_jax.catalog.records.tables import checkpoints, rollouts
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
    """A stored batch of rollouts; ``digest`` names its object, which records the revision of every token."""

    id: int
    policy: str
    step: int
    digest: str
    tokens: int
    mean_reward: float
    created_at: float


class Training(Lookup):
    """Records of training."""

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
            keep: the records of all but this many newest checkpoints are forgotten, as their files are.
        """

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> TrainingCheckpoint:
            check_writer(row, session)
            if keep is not None and whole("keep", keep) < 1:
                raise UserError(f"keep is {keep}; expected of how many checkpoints the records stay, at least 1")
            at = max(author.now, row.touched_at)
            values = {"policy_id": row.id, "step": whole("step", step), "place": note("place", place), "created_at": at}
            number = connection.scalar(checkpoints.insert().returning(checkpoints.c.id), values)
            touch(connection, author, row)
            details: dict[str, Any] = {"step": step, "place": place}
            if keep is not None:
                older = sa.select(checkpoints.c.id).where(checkpoints.c.policy_id == row.id).order_by(checkpoints.c.id.desc())
                if gone := list(connection.scalars(older.offset(keep))):
                    connection.execute(checkpoints.delete().where(checkpoints.c.id.in_(gone)))
                    details["forgotten"] = len(gone)
            audit.append(connection, audit.row(author, "checkpoint", row, details))
            return _checkpoint(row, number, values)

        return self._change(policy, body, by, why, active=True)

    def checkpoints(self, policy: str, limit: int = 100) -> list[TrainingCheckpoint]:
        """A policy's checkpoints, the newest first."""

        def body(connection: sa.Connection, row: sa.Row) -> list[TrainingCheckpoint]:
            query = sa.select(checkpoints).where(checkpoints.c.policy_id == row.id).order_by(checkpoints.c.id.desc()).limit(limit)
            return [_checkpoint(row, found.id, found._mapping) for found in connection.execute(query)]

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
                raise UserError(f"mean_reward of a rollout of {full_name(*key)!r} is {mean_reward}: give a finite number")
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
            audit.append(connection, audit.row(author, "rollout", row, {"step": step, "digest": digest.hex()}))
            return _rollout(row, number, values)

        return store_and_commit(self.database, self.store, {digest: data}, body)

    def rollouts(self, policy: str, limit: int = 100) -> list[RolloutRecord]:
        """A policy's rollout records, the newest first; ``read_rollout`` gives the bytes."""

        def body(connection: sa.Connection, row: sa.Row) -> list[RolloutRecord]:
            query = sa.select(rollouts).where(rollouts.c.policy_id == row.id).order_by(rollouts.c.id.desc()).limit(limit)
            return [_rollout(row, found.id, found._mapping) for found in connection.execute(query)]

        return self._look(policy, body)

    def read_rollout(self, record: RolloutRecord) -> np.ndarray:
        """The rollout object, ``uint8``, read-only, its digest verified."""
        return self._payload(record.digest)

    def drop_rollouts(self, policy: str, before_step: int, *, by: str | None = None, why: str = "") -> int:
        """Forgets rollouts of earlier steps; ``gc`` then frees their bytes."""

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> int:
            earlier = rollouts.delete().where(rollouts.c.policy_id == row.id, rollouts.c.step < before_step)
            if dropped := connection.execute(earlier).rowcount:
                touch(connection, author, row)
                audit.append(connection, audit.row(author, "drop rollouts", row, {"before_step": before_step, "rollouts": dropped}))
            return dropped

        return self._change(policy, body, by, why)


def _checkpoint(policy: sa.Row, number: Any, values: Any) -> TrainingCheckpoint:
    return TrainingCheckpoint(number, full_name(policy.tenant, policy.name), values["step"], values["place"], values["created_at"])


def _rollout(policy: sa.Row, number: Any, values: Any) -> RolloutRecord:
    mine, digest = full_name(policy.tenant, policy.name), values["digest"].hex()
    return RolloutRecord(number, mine, values["step"], digest, values["tokens"], values["mean_reward"], values["created_at"])
