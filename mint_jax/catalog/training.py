"""What training leaves beside revisions: checkpoints, which resume it, and rollouts, which it learned from.

A checkpoint's bytes are Orbax's (``mint_jax.checkpoint``); the catalog records where they lie. A rollout object is a payload
like a revision's.
"""

import math
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog import audit, policies, sessions
from mint_jax.catalog.audit import Author
from mint_jax.catalog.names import note, whole
from mint_jax.catalog.records import RolloutRecord, Session, TrainingCheckpoint, full_name
from mint_jax.catalog.tables import checkpoints, rollouts
from mint_jax.errors import UserError


def add_checkpoint(
    connection: sa.Connection, author: Author, policy: sa.Row, step: int, place: str, session: Session | None, keep: int | None = None
) -> TrainingCheckpoint:
    """Notes a committed checkpoint of a locked policy; of ``keep`` newest ones records stay, all of them by default."""
    sessions.check_writer(policy, session)
    if keep is not None and whole("keep", keep) < 1:
        raise UserError(f"keep is {keep}; expected of how many checkpoints the records stay, at least 1")
    values = {
        "policy_id": policy.id,
        "step": whole("step", step),
        "place": note("place", place),
        "created_at": max(author.now, policy.touched_at),
    }
    number = connection.scalar(checkpoints.insert().returning(checkpoints.c.id), values)
    policies.touch(connection, author, policy)
    details = {"step": step, "place": place}
    if keep is not None:
        older = sa.select(checkpoints.c.id).where(checkpoints.c.policy_id == policy.id).order_by(checkpoints.c.id.desc()).offset(keep)
        if gone := list(connection.scalars(older)):
            connection.execute(checkpoints.delete().where(checkpoints.c.id.in_(gone)))
            details["forgotten"] = len(gone)
    audit.append(connection, audit.row(author, "checkpoint", policy, details))
    return _checkpoint(policy, number, values)


def checkpoint_page(connection: sa.Connection, policy: sa.Row, limit: int) -> list[TrainingCheckpoint]:
    """A policy's newest checkpoints, the newest first."""
    query = sa.select(checkpoints).where(checkpoints.c.policy_id == policy.id).order_by(checkpoints.c.id.desc()).limit(limit)
    return [_checkpoint(policy, row.id, row._mapping) for row in connection.execute(query)]


def _checkpoint(policy: Any, number: Any, values: Any) -> TrainingCheckpoint:
    return TrainingCheckpoint(number, full_name(policy.tenant, policy.name), values["step"], values["place"], values["created_at"])


def add_rollout(
    connection: sa.Connection,
    author: Author,
    policy: sa.Row,
    step: int,
    digest: bytes,
    tokens: int,
    mean_reward: float,
    session: Session | None,
) -> RolloutRecord:
    """Notes a rollout object, whose payload row is there already, of a locked policy."""
    sessions.check_writer(policy, session)
    if not math.isfinite(mean_reward):
        raise UserError(f"mean_reward of a rollout of {full_name(policy.tenant, policy.name)!r} is {mean_reward}: give a finite number")
    values = {
        "policy_id": policy.id,
        "step": whole("step", step),
        "digest": digest,
        "tokens": whole("tokens", tokens),
        "mean_reward": float(mean_reward),
        "created_at": max(author.now, policy.touched_at),
    }
    number = connection.scalar(rollouts.insert().returning(rollouts.c.id), values)
    policies.touch(connection, author, policy)
    audit.append(connection, audit.row(author, "rollout", policy, {"step": step, "digest": digest.hex()}))
    return _rollout(policy, number, values)


def rollout_page(connection: sa.Connection, policy: sa.Row, limit: int) -> list[RolloutRecord]:
    """A policy's newest rollouts, the newest first."""
    query = sa.select(rollouts).where(rollouts.c.policy_id == policy.id).order_by(rollouts.c.id.desc()).limit(limit)
    return [_rollout(policy, row.id, row._mapping) for row in connection.execute(query)]


def drop_rollouts(connection: sa.Connection, author: Author, policy: sa.Row, before_step: int) -> int:
    """Forgets a locked policy's rollouts of steps below ``before_step``; garbage collection then frees their bytes."""
    dropped = connection.execute(rollouts.delete().where(rollouts.c.policy_id == policy.id, rollouts.c.step < before_step)).rowcount
    if dropped:
        policies.touch(connection, author, policy)
        audit.append(connection, audit.row(author, "drop rollouts", policy, {"before_step": before_step, "rollouts": dropped}))
    return dropped


def _rollout(policy: Any, number: Any, values: Any) -> RolloutRecord:
    return RolloutRecord(
        number,
        full_name(policy.tenant, policy.name),
        values["step"],
        values["digest"].hex(),
        values["tokens"],
        values["mean_reward"],
        values["created_at"],
    )
