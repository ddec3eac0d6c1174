"""The audit log checked against the records: what each policy, its revisions and its aliases must be, held against what their rows say.

The log records every change of what a name stands for and of what retention may remove, so each fact is in the database
twice, and a row that was changed by anything but the catalog is found whichever of the two it is.
"""

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.records.policies import DELETED
from mint_jax.catalog.records.tables import aliases, audit, policies, revisions, schemas, tags

PAGE = 200  # policies at a time


Contradiction = tuple[str, str, str]


def contradictions(connection: sa.Connection, after: int) -> tuple[list[Contradiction], int | None]:
    """What does not agree in a page of policies, those with ids above ``after``. The connection must see one moment.

    Returns:
        Each as ``policy``, ``revision`` or ``alias``; which one by name; and in words. And where the next page begins.
    """
    query = sa.select(policies, schemas.c.json).outerjoin(schemas).where(policies.c.id > after).order_by(policies.c.id).limit(PAGE)
    page = list(connection.execute(query))
    within = [row.id for row in page]
    log = _grouped(connection, sa.select(audit).where(audit.c.policy_id.in_(within)).order_by(audit.c.id))
    held = _grouped(connection, sa.select(revisions).where(revisions.c.policy_id.in_(within)).order_by(revisions.c.number))
    query = sa.select(aliases, revisions.c.number, revisions.c.policy_id.label("owner")).outerjoin(revisions)
    named = _grouped(connection, query.where(aliases.c.policy_id.in_(within)).order_by(aliases.c.name))
    tagged = _grouped(connection, sa.select(tags).where(tags.c.policy_id.in_(within)).order_by(tags.c.number, tags.c.key))
    found = []
    for policy in page:
        try:
            rows = (of.get(policy.id, []) for of in (log, held, named, tagged))
            found += list(_of_policy(policy, *rows))
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # a value that no writer makes, such as a null number
            what = f"the rows of policy {policy.id} cannot be read against the audit log ({type(error).__name__}: {str(error)[:80]})"
            found.append(("policy", str(policy.name), what))
    return found, page[-1].id if page else None


def _grouped(connection: sa.Connection, query: sa.Select) -> dict[int, list[sa.Row]]:
    found: dict[int, list[sa.Row]] = {}
    for row in connection.execute(query):
        found.setdefault(row.policy_id, []).append(row)
    return found


def _of_policy(policy: sa.Row, log: list[sa.Row], held: list[sa.Row], named: list[sa.Row], tagged: list[sa.Row]) -> Iterator[Contradiction]:
    name = full_name(policy.tenant, policy.name)
    try:
        logged, record, expected, moves, labels = _replay(log)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield "policy", name, f"the audit log of policy {name} is damaged ({type(error).__name__}: {str(error)[:80]})"
        return
    if logged not in (None, name):
        yield "policy", name, f"policy {name} was made as {logged}, says the audit log"
    for column, value in record.items():
        found = getattr(policy, column)
        if found != value:
            yield "policy", name, f"policy {name} has {column} {str(found)[:80]!r}, the audit log says {str(value)[:80]!r}"
    rows = {row.number: row for row in held}
    for number in sorted(expected.keys() | rows.keys()):
        named_so = f"{name}@{number}"
        row, wanted = rows.get(number), expected.get(number)
        if row is None or wanted is None:
            what = "is not there, though the audit log has it" if row is None else "is not in the audit log"
            yield "revision", named_so, f"revision {named_so} {what}"
            continue
        found = {"digest": row.digest.hex(), "step": row.step, "pinned": row.pinned, "state": row.state}
        for column, value in wanted.items():
            if found[column] != value:
                yield "revision", named_so, f"revision {named_so} has {column} {found[column]!r}, the audit log says {value!r}"
    there = {row.name: row for row in named}
    for alias in sorted(moves.keys() | there.keys()):
        row = there.get(alias)
        if row is None:
            yield "alias", f"{name}@{alias}", f"alias {name}@{alias} is not there, though the audit log has it"
        elif row.owner != policy.id:
            yield "alias", f"{name}@{alias}", f"alias {name}@{alias} names no revision of its policy"
        elif (row.number, row.version) != moves.get(alias):
            yield "alias", f"{name}@{alias}", f"alias {name}@{alias} is not where the audit log says"
    there = {(row.number, row.key): row.value for row in tagged}
    for number, key in sorted(labels.keys() | there.keys()):
        has, wanted = there.get((number, key)), labels.get((number, key))
        if has != wanted:
            whose = f"{name}@{number}" if number else name
            yield "revision" if number else "policy", whose, f"{whose} has tag {key}={has!r}, the audit log says {wanted!r}"


Replayed = tuple[str | None, dict[str, Any], dict[int, dict[str, Any]], dict[str, tuple[int, int]], dict[tuple[int, str], str]]


def _replay(log: list[sa.Row]) -> Replayed:
    """The policy's name, its columns, its revisions by number, its aliases' number and version, and tags by number and key."""
    record: dict[str, Any] = {"state": "active", "last_number": 0, "session_number": 0}
    expected: dict[int, dict[str, Any]] = {}
    moves: dict[str, tuple[int, int]] = {}
    labels: dict[tuple[int, str], str] = {}
    logged: str | None = None
    for row in log:
        details = json.loads(row.details)
        if row.action == "create":
            record |= {"json": details["schema"], "keep_last": details["keep_last"]}
            logged = details.get("policy")  # not in logs of earlier versions
        elif row.action == "keep_last":
            record["keep_last"] = details["after"]
        elif row.action in ("retire", "restore"):
            record["state"] = "retired" if row.action == "retire" else "active"
        elif row.action == "open session":
            record["session_number"] = details["session"]
        elif row.action == "remove revisions":
            for number in details["revisions"]:
                del expected[number]
                labels = {key: value for key, value in labels.items() if key[0] != number}
        elif row.action == "rename":
            logged = details["after"]
        elif row.action == "delete":
            logged = f"{details['policy']}@{DELETED}-{row.policy_id}"
            record["state"], expected, moves, labels = DELETED, {}, {}, {}
        elif row.action == "tag":
            for key, value in details["tags"].items():
                labels.pop((row.before or 0, key), None)
                if value is not None:
                    labels[row.before or 0, key] = value
        elif row.action in ("retire revision", "restore revision"):
            expected[row.before]["state"] = "retired" if row.action == "retire revision" else "live"
        elif row.action in ("pin", "unpin"):
            expected[row.before]["pinned"] = row.action == "pin"
        elif row.action in ("export", "branch"):
            made = expected.setdefault(row.after, {"pinned": False, "state": "live"})
            made["digest"] = details["digest"]
            if "step" in details:
                made["step"] = details["step"]
            record["last_number"] = max(record["last_number"], row.after)
        if row.alias is not None:
            moves[row.alias] = (row.after, row.version)
            if expected[row.after]["digest"] != details["digest"]:
                raise ValueError(f"entry {row.id} gives revision {row.after} another digest")
    return logged, record, expected, moves, labels
