"""Revisions of a policy: found, listed, retired, pinned. And tags: labels ``key=value`` of policies
and revisions.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.policies import Policies, PolicyRecord, touch
from mint_jax.catalog.records.tables import aliases, payloads, revisions, tags
from mint_jax.errors import UserError

LONGEST = 400  # characters of a value


@dataclasses.dataclass(frozen=True)
class Revision:
    """An immutable export of a policy's adapter.

    Attributes:
        bytes: length of the packed object.
        state: ``live`` or ``retired``.
        sampling: how training drew the rollouts, as ``rollout.request.Request`` names it; None
            where it drew none or it is unknown.
    """

    id: int
    policy: str
    number: int
    step: int
    digest: str
    bytes: int
    origin: str
    pinned: bool
    state: str
    created_at: float
    sampling: dict[str, Any] | None = None


class Revisions(Policies):
    """Looks at revisions and keeps them, or takes them out of use; sets and shows tags."""

    def revisions(self, policy: str, after: int = 0, limit: int = 1000) -> list[Revision]:
        """A page of a policy's revisions by number."""

        def body(connection: sa.Connection, row: sa.Row) -> list[Revision]:
            query = (
                _revisions(row)
                .where(revisions.c.number > after)
                .order_by(revisions.c.number)
                .limit(limit)
            )
            return [as_revision(row, found) for found in connection.execute(query)]

        return self._look(policy, body)

    def revision(self, policy: str, which: int | str) -> Revision:
        """One revision: by number, alias, digest or full name; retired ones too."""
        return self._look(policy, lambda c, row: as_revision(row, find_revision(c, row, which)))

    def retire(
        self,
        policy: str,
        revision: int | str | None = None,
        *,
        by: str | None = None,
        why: str = "",
    ) -> None:
        """Takes a policy, or one of its revisions, out of use: it no longer resolves, and ``gc``
        may remove the revision.

        Raises:
            UserError: an alias names the revision.
        """
        self._set_state(policy, revision, "retired", by, why)

    def restore(
        self,
        policy: str,
        revision: int | str | None = None,
        *,
        by: str | None = None,
        why: str = "",
    ) -> None:
        """Undoes ``retire``, for a revision as long as ``gc`` has not removed it."""
        self._set_state(policy, revision, "active" if revision is None else "live", by, why)

    def _set_state(
        self, policy: str, revision: int | str | None, state: str, by: str | None, why: str
    ) -> None:
        def body(connection: sa.Connection, author: Author, row: sa.Row) -> None:
            if revision is None:
                _set_policy_state(connection, author, row, state)
            else:
                _set_revision_state(
                    connection, author, row, find_revision(connection, row, revision), state
                )

        self._change(policy, body, by, why)

    def pin(
        self, policy: str, revision: int | str, *, by: str | None = None, why: str = ""
    ) -> None:
        """Keeps a revision whatever retention says."""
        self._set_pinned(policy, revision, True, by, why)

    def unpin(
        self, policy: str, revision: int | str, *, by: str | None = None, why: str = ""
    ) -> None:
        """Undoes ``pin``."""
        self._set_pinned(policy, revision, False, by, why)

    def _set_pinned(
        self, policy: str, revision: int | str, pinned: bool, by: str | None, why: str
    ) -> None:
        def body(connection: sa.Connection, author: Author, row: sa.Row) -> None:
            found = find_revision(connection, row, revision)
            if found.pinned == pinned:
                return
            connection.execute(
                revisions.update().where(revisions.c.id == found.id).values(pinned=pinned)
            )
            touch(connection, author, row)
            details = {"digest": found.digest.hex()}
            audit.append(
                connection,
                audit.row(author, "pin" if pinned else "unpin", row, details, before=found.number),
            )

        self._change(policy, body, by, why)

    def tag(
        self, name: str, changes: Mapping[str, str | None], *, by: str | None = None, why: str = ""
    ) -> dict[str, str]:
        """Sets tags of a policy (``policy``) or of a revision (``policy@…``), and returns all that
        it has then.

        Args:
            changes: values by key; None removes a tag.

        Raises:
            UserError: a key or a value that cannot be kept, or an unknown policy or revision.
        """
        wanted = {
            names.clean("tag", key): None if value is None else _value(key, value)
            for key, value in changes.items()
        }
        policy, at, which = name.partition("@")

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> dict[str, str]:
            number = find_revision(connection, row, which).number if at else 0
            before = _of(connection, row, number)
            changed = {
                key: value for key, value in sorted(wanted.items()) if before.get(key) != value
            }
            if not changed:
                return before
            mine = (tags.c.policy_id == row.id, tags.c.number == number)
            connection.execute(tags.delete().where(*mine, tags.c.key.in_(list(changed))))
            rows = [
                {"policy_id": row.id, "number": number, "key": k, "value": v}
                for k, v in changed.items()
                if v is not None
            ]
            if rows:
                connection.execute(tags.insert(), rows)
            touch(connection, author, row)
            audit.append(
                connection, audit.row(author, "tag", row, {"tags": changed}, before=number or None)
            )
            return _of(connection, row, number)

        return self._change(policy, body, by, why)

    def tags(self, name: str) -> dict[str, str]:
        """Tags of a policy or of a revision, by key."""
        policy, at, which = name.partition("@")

        def body(connection: sa.Connection, row: sa.Row) -> dict[str, str]:
            return _of(connection, row, find_revision(connection, row, which).number if at else 0)

        return self._look(policy, body)

    def tags_of(self, records: Sequence[PolicyRecord]) -> dict[str, dict[str, str]]:
        """Tags of many policies, by their full names."""
        found: dict[int, dict[str, str]] = {one.id: {} for one in records}
        for some in chunks(list(found)):
            query = (
                sa.select(tags)
                .where(tags.c.policy_id.in_(some), tags.c.number == 0)
                .order_by(tags.c.key)
            )
            for row in self.database.read(lambda c, query=query: c.execute(query).all()):
                found[row.policy_id][row.key] = row.value
        return {one.policy: found[one.id] for one in records}


def _revisions(policy: sa.Row) -> sa.Select:
    return (
        sa.select(revisions, payloads.c.length)
        .join(payloads)
        .where(revisions.c.policy_id == policy.id)
    )


def as_revision(policy: Any, row: Any) -> Revision:
    """The record of a row of ``revisions`` with its payload's ``length``."""
    return Revision(
        row.id,
        full_name(policy.tenant, policy.name),
        row.number,
        row.step,
        row.digest.hex(),
        row.length,
        row.origin,
        row.pinned,
        row.state,
        row.created_at,
        None if row.sampling is None else json.loads(row.sampling),
    )


def find_revision(
    connection: sa.Connection, policy: sa.Row, which: int | str, live: bool = False
) -> sa.Row:
    """A revision of a policy: its number, an alias, a digest or a prefix of one, or a full name of
    this policy.

    Raises:
        UserError: there is none, several, or it is retired and must be ``live``.
    """
    mine = full_name(policy.tenant, policy.name)
    named = _within(policy, which)
    query = _revisions(policy)
    if named.number is not None:
        query = query.where(revisions.c.number == named.number)
    elif named.digest is not None:
        low, high = names.digest_range(named.digest)
        query = query.where(revisions.c.digest.between(low, high)).order_by(
            revisions.c.number.desc()
        )
    else:
        query = query.join(aliases, aliases.c.revision_id == revisions.c.id)
        query = query.where(aliases.c.policy_id == policy.id, aliases.c.name == named.alias)
    found = list(connection.execute(query))
    if not found:
        raise UserError(
            f"policy {mine!r} has no revision {which if isinstance(which, int) else which[:80]}:"
            " list its revisions and aliases"
        )
    if len({row.digest for row in found}) > 1:
        raise UserError(
            f"{which!r} begins {len(found)} digests of policy {mine!r}: give more digits"
        )
    if live and found[0].state != "live":
        raise UserError(
            f"revision {mine}@{found[0].number} is retired: restore it first, or choose another"
        )
    return found[0]


def _within(policy: sa.Row, which: int | str) -> names.RevisionName:
    if not isinstance(which, str):
        which = names.whole("revision number", which, 1, 10**9)
        return names.RevisionName(policy.tenant, policy.name, number=which)
    if not ("@" in which or "/" in which):
        return names.parse_revision(which if names.is_digest(which) else f"p@{which}")
    named = names.parse_revision(which)
    if named.digest is None and (named.tenant, named.policy) != (policy.tenant, policy.name):
        raise UserError(
            f"revision {which[:80]!r} is not of policy {full_name(policy.tenant, policy.name)!r}:"
            " branch from it instead"
        )
    return named


def _set_policy_state(
    connection: sa.Connection, author: Author, policy: sa.Row, state: str
) -> None:
    if policy.state == state:
        return
    touch(connection, author, policy, state=state)
    audit.append(
        connection, audit.row(author, "retire" if state == "retired" else "restore", policy)
    )


def _set_revision_state(
    connection: sa.Connection, author: Author, policy: sa.Row, row: sa.Row, state: str
) -> None:
    if row.state == state:
        return
    if state == "retired":
        held = list(
            connection.scalars(
                sa.select(aliases.c.name)
                .where(aliases.c.revision_id == row.id)
                .order_by(aliases.c.name)
            )
        )
        if held:
            mine = f"{full_name(policy.tenant, policy.name)}@{row.number}"
            raise UserError(
                f"revision {mine} is named by {', '.join(held)}: promote another or roll back first"
            )
    connection.execute(revisions.update().where(revisions.c.id == row.id).values(state=state))
    touch(connection, author, policy)
    action = "retire revision" if state == "retired" else "restore revision"
    audit.append(
        connection,
        audit.row(author, action, policy, {"digest": row.digest.hex()}, before=row.number),
    )


def _of(connection: sa.Connection, policy: sa.Row, number: int) -> dict[str, str]:
    query = sa.select(tags.c.key, tags.c.value).where(
        tags.c.policy_id == policy.id, tags.c.number == number
    )
    return dict(connection.execute(query.order_by(tags.c.key)).tuples().all())


def _value(key: str, value: str) -> str:
    names.note(f"value of tag {key[:40]!r}", value, LONGEST)
    if not value:
        raise UserError(f"the value of tag {key[:40]!r} is empty: give a text, or remove the tag")
    return value
