"""Canaries: a candidate answers a share of an alias's requests until the evidence decides.

The alias keeps pointing at its revision, the parent. Whoever serves it draws the candidate with
probability ``share``, and gives the rewards of the answers to ``observe``. Two hypotheses about
mean rewards are tested at every reward, each at level ``alpha`` (``mint_jax.catalog.evidence``):

    refuted: candidate >= parent - margin    rolled back: the alias stays where it is
    refuted: candidate <= parent - margin    promoted: the alias moves to the candidate

Rewards may be given again, after a crash: each source numbers its own, and a number counts once.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Unpack

import sqlalchemy as sa

from mint_jax.catalog.evidence import ArmReward, CanaryEvidence
from mint_jax.catalog.records import names
from mint_jax.catalog.records.aliases import current, promote_in
from mint_jax.catalog.records.audit import Signed
from mint_jax.catalog.records.handle import Change, Handle
from mint_jax.catalog.records.lookup import find_in
from mint_jax.catalog.records.names import LATEST
from mint_jax.catalog.records.tables import aliases, as_record, policies
from mint_jax.catalog.records.tables import canaries as table
from mint_jax.errors import UserError

_GUARD = re.compile(r"\s*reward\s*>=\s*parent\s*(?:-\s*(?P<margin>[0-9]{0,9}\.?[0-9]{1,9})\s*)?")


@dataclasses.dataclass(frozen=True)
class Canary:
    """A canary on an alias. ``state`` is ``open``, ``promoted``, ``rolled back``, ``ended`` (by
    hand) or ``superseded`` (the alias was moved).

    Attributes:
        parent, candidate: revision numbers; ``digest`` is the candidate's.
        share: probability that the candidate answers.
        margin: by how much the candidate's mean reward may be below the parent's.
        alpha: probability of each of the two errors, at most.
    """

    id: int
    policy: str
    alias: str
    parent: int
    candidate: int
    digest: str
    share: float
    margin: float
    alpha: float
    state: str
    evidence: CanaryEvidence
    opened_at: float
    updated_at: float


def margin_of(guard: str) -> float:
    """Returns the margin of a guard, ``reward>=parent-0.02`` or ``reward>=parent``. Raises
    ``UserError``: it is malformed, or the margin is 1 or more.
    """
    found = _GUARD.fullmatch(guard) if isinstance(guard, str) else None
    margin = 1.0 if found is None else float(found["margin"] or 0)
    if margin >= 1:
        raise UserError(
            f"guard is {str(guard)[:80]!r}; expected reward>=parent-MARGIN, with a margin from 0"
            " to below 1: rewards are from 0 to 1"
        )
    return margin


def open_canary(
    catalog: Handle,
    policy: str,
    revision: int | str,
    alias: str = "serving",
    *,
    share: float,
    guard: str,
    alpha: float = 0.05,
    **signed: Unpack[Signed],
) -> Canary:
    """Opens a canary of a live revision on an alias, see ``Canary`` and ``margin_of``. Raises
    ``UserError``: share, guard or alpha are not allowed, the alias does not exist, points at the
    revision, has a canary already, or is ``latest``.
    """
    alias, margin = names.clean_alias(alias), margin_of(guard)
    for what, value, most in (("share", share, 0.5), ("alpha", alpha, 0.5)):
        if not 0 < value <= most:
            raise UserError(f"{what} of a canary is {value}; expected a number above 0, to {most}")
    if alias == LATEST:
        raise UserError("latest moves with every export: open the canary on another alias")

    def body(change: Change) -> Canary:
        connection, row, full = change.connection, change.policy, f"{change.full}@{alias}"
        target = find_in(connection, row, revision, live=True)
        if (now := current(connection, row, alias)) is None:
            raise UserError(f"alias {full} does not exist: promote a first revision to it")
        if now.digest == target.digest:
            raise UserError(
                f"revision {change.full}@{target.number} has the bytes that {full} points at:"
                " choose another candidate"
            )
        if now.canary_id is not None:
            raise UserError(
                f"alias {full} has a canary, {now.canary_id}: wait for its decision, or end it"
            )
        terms = {"alias": alias, "parent": now.number, "share": float(share), "margin": margin}
        terms |= {"alpha": float(alpha)}
        values = terms | {
            "policy_id": row.id,
            "candidate": target.number,
            "digest": target.digest,
            "state": "open",
            "evidence": _text(CanaryEvidence(), {}),
            "opened_at": change.now,
            "updated_at": change.now,
        }
        number = connection.execute(table.insert().returning(table.c.id), values).scalar_one()
        own = (aliases.c.policy_id == row.id, aliases.c.name == alias)
        connection.execute(aliases.update().where(*own).values(canary_id=number))
        change.record("open canary", {"canary": number, **terms}, before=target.number)
        return _one(connection, number)[0]

    return catalog.change(policy, body, **signed, active=True)


def end_canary(
    catalog: Handle, policy: str, alias: str = "serving", **signed: Unpack[Signed]
) -> Canary:
    """Ends an alias's canary without a decision. Raises ``UserError`` if none is open."""
    alias = names.clean_alias(alias)

    def body(change: Change) -> Canary:
        now = current(change.connection, change.policy, alias)
        if now is None or now.canary_id is None:
            raise UserError(
                f"alias {change.full}@{alias} has no open canary: list the policy's canaries"
            )
        found, _ = _one(change.connection, now.canary_id)
        return _close(change, found, "ended", "end canary")

    return catalog.change(policy, body, **signed)


def list_canaries(
    catalog: Handle, policy: str, alias: str | None = None, limit: int = 20
) -> list[Canary]:
    """Returns canaries of a policy, or of one of its aliases, newest first."""
    chosen = [] if alias is None else [table.c.alias == names.clean_alias(alias)]

    def body(connection: sa.Connection, row: sa.Row) -> list[Canary]:
        own = (table.c.policy_id == row.id, *chosen)
        return [found for found, _ in _found(connection, *own, limit=limit)]

    return catalog.look(policy, body)


def canary(catalog: Handle, id: int) -> Canary:
    """Returns a canary by its id."""
    return catalog.database.read(lambda c: _one(c, id)[0])


def observe(
    catalog: Handle,
    id: int,
    source: str,
    rewards: Sequence[tuple[int, ArmReward]],
    **signed: Unpack[Signed],
) -> Canary:
    """Adds rewards to a canary's evidence, in order, and decides as soon as that allows it; further
    rewards, and those of a canary that is not open, change nothing.

    Args:
        source: id of the giver, whose rewards are numbered.
        rewards: pairs of number and reward, numbers ascending; those up to the last number that
            this source has given are left out.

    Raises:
        UserError: there is no such canary, or a reward or propensity is out of range.
    """

    def body(change: Change) -> Canary:
        connection = change.connection
        found, places = _one(connection, id)
        new = [(place, one) for place, one in rewards if place > places.get(source, 0)]
        if found.state != "open" or not new:
            return found
        evidence, state = found.evidence, "open"
        for place, one in new:
            evidence, places[source] = evidence.after(one, found.margin), place
            if (state := _decision(evidence, found.alpha)) != "open":
                break
        found = dataclasses.replace(found, evidence=evidence, updated_at=change.now)
        values = {"evidence": _text(evidence, places), "updated_at": change.now}
        connection.execute(table.update().where(table.c.id == id).values(**values))
        if state == "open":
            return found
        why = reason(found, state)
        change = change._replace(author=dataclasses.replace(change.author, why=why))
        action = "roll back canary" if state == "rolled back" else "promote canary"
        closed = _close(change, found, state, action)
        if state == "promoted":
            target = find_in(connection, change.policy, found.candidate, live=True)
            promote_in(change, target, found.alias, canary=id)
        return closed

    return catalog.change(canary(catalog, id).policy, body, **signed)


def reason(canary: Canary, state: str) -> str:
    """Returns the numbers behind a decision, in words."""
    evidence = canary.evidence
    e, claim = (evidence.e_worse, "below") if state == "rolled back" else (evidence.e_fit, "above")
    (_, of_candidate), (n_parent, n_candidate) = evidence.means, evidence.answers
    mean = "none" if of_candidate is None else f"{of_candidate:.4g}"
    parent = "none" if evidence.means[0] is None else f"{evidence.means[0]:.4g}"
    return (
        f"canary {canary.id}: mean reward {mean} of revision {canary.candidate} ({n_candidate}"
        f" answers), {parent} of revision {canary.parent} ({n_parent}); e-value {e:.4g} of"
        f" {1 / canary.alpha:g} that it is {claim} parent - {canary.margin:g}"
    )


def _decision(evidence: CanaryEvidence, alpha: float) -> str:
    if evidence.e_worse >= 1 / alpha:
        return "rolled back"
    return "promoted" if evidence.e_fit >= 1 / alpha else "open"


def _close(change: Change, found: Canary, state: str, action: str) -> Canary:
    """Closes an open canary, with its audit entry."""
    closed = dataclasses.replace(found, state=state, updated_at=change.now)
    own = table.update().where(table.c.id == found.id)
    change.connection.execute(own.values(state=state, updated_at=change.now))
    alias = aliases.update().where(aliases.c.canary_id == found.id)
    change.connection.execute(alias.values(canary_id=None))
    details = {"canary": found.id, "alias": found.alias, "parent": found.parent}
    facts = ("e_worse", "e_fit", "answers", "means")
    details |= {name: getattr(found.evidence, name) for name in facts}
    change.record(action, details, before=found.candidate)
    return closed


def _text(evidence: CanaryEvidence, places: dict[str, int]) -> str:
    """Returns the column ``evidence``; ``places``: number of the last reward of each source."""
    return json.dumps(evidence.to_dict() | {"places": places})


def _one(connection: sa.Connection, id: int) -> tuple[Canary, dict[str, int]]:
    """Returns a canary and its evidence's places."""
    if not (found := _found(connection, table.c.id == id)):
        raise UserError(f"there is no canary {id}: list those of a policy")
    return found[0]


def _found(
    connection: sa.Connection, *conditions: sa.ColumnElement[bool], limit: int = 1
) -> list[tuple[Canary, dict[str, int]]]:
    query = sa.select(table, policies.c.tenant, policies.c.name).join(policies)
    query = query.where(*conditions).order_by(table.c.id.desc()).limit(limit)
    found = []
    for row in connection.execute(query):
        fields = json.loads(row.evidence)
        places = fields.pop("places")
        evidence = CanaryEvidence.from_dict(fields)
        found.append((as_record(Canary, row, evidence=evidence), places))
    return found
