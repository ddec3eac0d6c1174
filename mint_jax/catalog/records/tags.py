"""Tags: short labels of policies and of revisions, ``key=value``, to find them by."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from mint_jax.catalog.records import audit, names
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.database import chunks
from mint_jax.catalog.records.policies import Policies, PolicyRecord, touch
from mint_jax.catalog.records.revisions import find_revision
from mint_jax.catalog.records.tables import tags
from mint_jax.errors import UserError

LONGEST = 400  # characters of a value


class Tags(Policies):
    """Sets and shows tags."""

    def tag(self, name: str, changes: Mapping[str, str | None], *, by: str | None = None, why: str = "") -> dict[str, str]:
        """Sets tags of a policy (``policy``) or of a revision (``policy@…``), and returns all that it has then.

        Args:
            changes: values by key; None removes a tag.

        Raises:
            UserError: a key or a value that cannot be kept, or an unknown policy or revision.
        """
        wanted = {names.clean("tag", key): None if value is None else _value(key, value) for key, value in changes.items()}
        policy, at, which = name.partition("@")

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> dict[str, str]:
            number = find_revision(connection, row, which).number if at else 0
            before = _of(connection, row, number)
            changed = {key: value for key, value in sorted(wanted.items()) if before.get(key) != value}
            if not changed:
                return before
            mine = (tags.c.policy_id == row.id, tags.c.number == number)
            connection.execute(tags.delete().where(*mine, tags.c.key.in_(list(changed))))
            rows = [{"policy_id": row.id, "number": number, "key": k, "value": v} for k, v in changed.items() if v is not None]
            if rows:
                connection.execute(tags.insert(), rows)
            touch(connection, author, row)
            audit.append(connection, audit.row(author, "tag", row, {"tags": changed}, before=number or None))
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
            query = sa.select(tags).where(tags.c.policy_id.in_(some), tags.c.number == 0).order_by(tags.c.key)
            for row in self.database.read(lambda c, query=query: c.execute(query).all()):
                found[row.policy_id][row.key] = row.value
        return {one.policy: found[one.id] for one in records}


def _of(connection: sa.Connection, policy: sa.Row, number: int) -> dict[str, str]:
    query = sa.select(tags.c.key, tags.c.value).where(tags.c.policy_id == policy.id, tags.c.number == number)
    return dict(connection.execute(query.order_by(tags.c.key)).tuples().all())


def _value(key: str, value: str) -> str:
    names.note(f"value of tag {key[:40]!r}", value, LONGEST)
    if not value:
        raise UserError(f"the value of tag {key[:40]!r} is empty: give a text, or remove the tag")
    return value
