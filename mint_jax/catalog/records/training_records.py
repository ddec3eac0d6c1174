"""Records of training: checkpoints, from which a run resumes, rollouts, from which it learned, and
evaluations, scores of a revision's bytes on one base.

Orbax writes a checkpoint's bytes (``mint_jax.checkpoint``); the catalog records their path. A
rollout object is a payload, like a revision's. A score is computed twice, with the revision loaded
alone and in a batch with other revisions, as serving does. If the two differ, the score says
nothing about what is served, and is refused.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import sqlalchemy as sa

from mint_jax.catalog.packed import Buffer, digest_of
from mint_jax.catalog.records import lookup, names
from mint_jax.catalog.records.audit import Signed
from mint_jax.catalog.records.handle import Change, Handle, lock
from mint_jax.catalog.records.lookup import find_in
from mint_jax.catalog.records.names import note, whole
from mint_jax.catalog.records.payload_rows import add_payloads, store_and_commit
from mint_jax.catalog.records.sessions import Session, check_writer
from mint_jax.catalog.records.tables import (
    as_record,
    checkpoints,
    evaluations,
    policies,
    revisions,
    rollouts,
)
from mint_jax.catalog.storage.payloads import Place
from mint_jax.errors import UserError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TrainingCheckpoint:
    """The place of the state that resumes training."""

    id: int
    policy: str
    step: int
    place: str
    created_at: float


@dataclasses.dataclass(frozen=True)
class RolloutRecord:
    """A stored batch of rollouts. ``digest`` is its object's, which records the revision of every
    token (``mint_jax.catalog.rollouts``).
    """

    id: int
    policy: str
    step: int
    digest: str
    tokens: int
    mean_reward: float
    created_at: float


def checkpoint(
    catalog: Handle,
    policy: str,
    step: int,
    place: str,
    *,
    session: Session | None = None,
    keep: int | None = None,
    **signed: Unpack[Signed],
) -> TrainingCheckpoint:
    """Records that a training checkpoint is committed at ``place``. ``keep``: number of newest
    checkpoints whose records stay; None keeps all.
    """
    if keep is not None:
        whole("keep", keep, 1)
    values = {"step": whole("step", step), "place": note("place", place)}

    def body(change: Change) -> TrainingCheckpoint:
        check_writer(change.policy, session)
        details: dict[str, Any] = dict(values)
        _insert(change, checkpoints, values)
        if keep is not None:
            older = sa.select(checkpoints.c.id).where(checkpoints.c.policy_id == change.policy.id)
            older = older.order_by(checkpoints.c.id.desc()).offset(keep)
            if removed := list(change.connection.scalars(older)):
                removal = checkpoints.delete().where(checkpoints.c.id.in_(removed))
                change.connection.execute(removal)
                details["forgotten"] = len(removed)
        change.record("checkpoint", details)
        return _newest(TrainingCheckpoint, checkpoints, 1)(change.connection, change.policy)[0]

    return catalog.change(policy, body, **signed, active=True)


def list_checkpoints(catalog: Handle, policy: str, limit: int = 100) -> list[TrainingCheckpoint]:
    """Returns a policy's checkpoints, newest first."""
    return catalog.look(policy, _newest(TrainingCheckpoint, checkpoints, limit))


def rollout(
    catalog: Handle,
    policy: str,
    step: int,
    data: Buffer,
    *,
    tokens: int,
    mean_reward: float,
    session: Session | None = None,
    **signed: Unpack[Signed],
) -> RolloutRecord:
    """Stores a rollout object (``rollouts.pack_rollouts``) of one step."""
    key, author = names.parse_policy(policy), catalog.author(**signed)
    digest = bytes.fromhex(digest_of(data))
    if not math.isfinite(mean_reward):
        raise UserError(f"mean_reward of {policy!r} is {mean_reward}: give a finite number")
    values = {"step": whole("step", step), "digest": digest, "tokens": whole("tokens", tokens)}
    values["mean_reward"] = float(mean_reward)

    def body(connection: sa.Connection, places: dict[bytes, Place]) -> RolloutRecord:
        change = Change(connection, author, lock(connection, *key, active=True))
        add_payloads(connection, author, {digest: None}, places)
        check_writer(change.policy, session)
        _insert(change, rollouts, values)
        change.record("rollout", {"step": step, "digest": digest.hex()})
        return _newest(RolloutRecord, rollouts, 1)(connection, change.policy)[0]

    return store_and_commit(catalog.database, catalog.store, {digest: data}, body)


def list_rollouts(catalog: Handle, policy: str, limit: int = 100) -> list[RolloutRecord]:
    """Returns a policy's rollout records, newest first; ``load_payload`` loads one."""
    return catalog.look(policy, _newest(RolloutRecord, rollouts, limit))


def drop_rollouts(catalog: Handle, policy: str, before_step: int, **signed: Unpack[Signed]) -> int:
    """Removes the records of rollouts of earlier steps; ``gc`` then frees their bytes."""

    def body(change: Change) -> int:
        earlier = (rollouts.c.policy_id == change.policy.id, rollouts.c.step < before_step)
        dropped = change.connection.execute(rollouts.delete().where(*earlier)).rowcount
        if dropped:
            change.record("drop rollouts", {"before_step": before_step, "rollouts": dropped})
        return dropped

    return catalog.change(policy, body, **signed)


def _insert(change: Change, table: sa.Table, values: dict[str, Any]) -> None:
    about = {"policy_id": change.policy.id, "created_at": change.now}
    change.connection.execute(table.insert(), about | values)


def _newest(
    kind: Callable[..., T], table: sa.Table, limit: int
) -> Callable[[sa.Connection, sa.Row], list[T]]:
    """Returns a function that finds a policy's newest records."""
    query = sa.select(table, policies.c.tenant, policies.c.name).join(policies)
    query = query.order_by(table.c.id.desc()).limit(limit)

    def body(connection: sa.Connection, policy: sa.Row) -> list[T]:
        found = connection.execute(query.where(table.c.policy_id == policy.id))
        return [as_record(kind, row) for row in found]

    return body


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A score and everything that produced it."""

    id: int
    policy: str | None  # None once retention removed the revision
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


def record_evaluation(
    catalog: Handle,
    revision: str,
    *,
    renderer: str,
    scorer: str,
    dataset: str,
    seed: int,
    metrics: dict[str, Any],
    isolated: float,
    shared: float,
    **signed: Unpack[Signed],
) -> Evaluation:
    """Records a score of a revision. Raises ``UserError``: the scores are not finite or differ,
    or ``metrics`` is not JSON.

    Args:
        dataset: digest of the data.
        isolated, shared: the score with the revision loaded alone, and in a batch with others.
    """
    found = lookup.resolve(catalog, revision)
    named = f"{found.policy}@{found.number}"
    isolated, shared = float(isolated), float(shared)
    if not math.isfinite(isolated) or isolated != shared:
        raise UserError(
            f"score of {named} is {isolated} loaded alone and {shared} in a shared batch: find"
            " which of the two serves other bytes before recording it"
        )
    try:
        text = json.dumps(metrics, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"metrics of {named} are not JSON ({error}): give finite numbers and text"
        ) from None
    texts = {"renderer": renderer, "scorer": scorer, "dataset": dataset}
    values: dict[str, Any] = {name: note(name, value) for name, value in texts.items()}
    values |= {"seed": whole("seed", seed, -(2**62)), "metrics": text}
    values |= {"isolated": isolated, "shared": shared}

    def body(change: Change) -> Evaluation:
        scored = find_in(change.connection, change.policy, found.number)
        about = {"revision_id": scored.id, "digest": scored.digest, "base": change.policy.base}
        insert = evaluations.insert().returning(evaluations.c.id)
        row = values | about | {"created_at": change.now}
        number = change.connection.scalar(insert, row)
        details = {"digest": scored.digest.hex(), "evaluation": number, "scorer": scorer}
        details["score"] = isolated
        change.record("evaluate", details, before=scored.number)
        return _evaluations(change.connection, evaluations.c.id == number, 1)[0]

    return catalog.change(found.policy, body, **signed)


def list_evaluations(catalog: Handle, name: str, limit: int = 1000) -> list[Evaluation]:
    """Returns the scores of a policy (``policy``), or of the bytes of one revision (``policy@…`` or
    a digest), whichever policy they were recorded for.
    """
    if not ("@" in name or names.is_digest(name)):
        return catalog.look(
            name, lambda c, row: _evaluations(c, revisions.c.policy_id == row.id, limit)
        )
    policy, at, which = name.partition("@")
    if at:
        digest = lookup.revision(catalog, policy, which).digest
    else:
        digest = name if len(name) == 64 else lookup.resolve(catalog, name).digest
    scored = evaluations.c.digest == bytes.fromhex(digest)
    return catalog.database.read(lambda c: _evaluations(c, scored, limit))


def _evaluations(
    connection: sa.Connection, condition: sa.ColumnElement[bool], limit: int
) -> list[Evaluation]:
    query = sa.select(evaluations, revisions.c.number, policies.c.tenant, policies.c.name)
    query = query.outerjoin(revisions, evaluations.c.revision_id == revisions.c.id)
    query = query.outerjoin(policies, revisions.c.policy_id == policies.c.id)
    query = query.where(condition).order_by(evaluations.c.id).limit(limit)
    return [
        as_record(Evaluation, row, metrics=json.loads(row.metrics))
        for row in connection.execute(query)
    ]
