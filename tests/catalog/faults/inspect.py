"""What a fresh process finds in a catalog whose writers were killed, held against their logs."""

import json
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from mint_jax.catalog.gc import Report
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records import tables
from mint_jax.errors import UserError
from tests.catalog.faults.deeds import SHARED, TRASH


def deeds_of(folder: str) -> dict[str, dict]:
    """Returns what all workers reported of each deed, by its author: ``done``, ``refused``, or in
    flight: at most one of each worker.
    """
    found: dict[str, dict] = {}
    for file in Path(folder).iterdir():
        for text in file.read_text().split("\n")[:-1]:  # a line that was cut off was not said
            line = json.loads(text)
            if "by" in line:
                found.setdefault(line["by"], {}).update(line)
    return found


def settle(catalog: Catalog) -> None:
    """Waits until PostgreSQL has noticed that the killed are gone: until then their last commit may
    still be made.
    """
    if catalog.database.sqlite:
        return
    others = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid !="
        " pg_backend_pid()"
    )
    while True:
        with catalog.database.engine.connect() as connection:
            if not connection.scalar(others):
                return
        time.sleep(0.002)


def inspect(catalog: Catalog, logs: str, collect: bool) -> list[str]:
    """What is wrong, in words.

    Args:
        logs: folder of the workers' logs.
        collect: nobody writes: collect all garbage, and look again.
    """
    settle(catalog)
    deeds = deeds_of(logs)
    wrong = [f"{by} was refused: {x['refused']}" for by, x in deeds.items() if "refused" in x]
    with catalog.database.engine.connect() as connection:
        wrong += _against(connection, deeds)
        wrong += _aliases(connection)
        live = _live(connection)
    wrong += [f"verify: {finding}" for finding in catalog.verify()]
    if not collect:
        wrong += _loads(catalog, live)
    elif not wrong:
        catalog.gc(grace_s=-10.0, compact=False, by="inspector")
        second = catalog.gc(grace_s=-10.0, compact=False, by="inspector")
        if second != Report(False):
            wrong.append(f"a second collection still found {second}")
        query = sa.select(tables.packs.c.name).where(tables.packs.c.state == "live")
        named = catalog.database.read(lambda c: set(c.scalars(query)))
        stored = {info.name for info in catalog.store.packs()}
        if named != stored:
            wrong.append(f"packs named or stored, but not both: {named ^ stored}")
        if left := list(catalog.store._storage.list("staging/")):
            wrong.append(f"files of killed writers are left: {left}")
        wrong += _loads(catalog, live)
    return wrong


def _live(connection: sa.Connection) -> list[tuple[str, str]]:
    policies, revisions = tables.policies, tables.revisions
    query = sa.select(policies.c.tenant, policies.c.name, revisions.c.number, revisions.c.digest)
    query = query.join_from(policies, revisions, revisions.c.policy_id == policies.c.id)
    found = connection.execute(query.where(revisions.c.state == "live", policies.c.name != TRASH))
    return [(f"{row.tenant}/{row.name}@{row.number}", row.digest.hex()) for row in found]


def _loads(catalog: Catalog, live: list[tuple[str, str]]) -> list[str]:
    wrong = []
    for (name, digest), found in zip(live, catalog.resolve_many([name for name, _ in live])):
        if found.digest != digest:
            wrong.append(f"{name} resolves to {found.digest}, its row says {digest}")
        try:
            catalog.load(name)
        except UserError as error:
            wrong.append(f"{name} does not load: {error}")
    return wrong


def _against(connection: sa.Connection, deeds: dict[str, dict]) -> list[str]:
    """The rows: all that was acknowledged, of what was in flight all or nothing, and nothing
    else.
    """
    wrong: list[str] = []
    names = {row.id: _full(row) for row in connection.execute(sa.select(tables.policies))}
    log = list(connection.execute(sa.select(tables.audit).order_by(tables.audit.c.id)))
    authors = {row.actor for row in log}
    gone = {  # what retention removed, which only the trash may suffer
        (names[row.policy_id], digest)
        for row in log
        if row.action == "remove revisions"
        for digest in json.loads(row.details)["digests"]
    }
    if any(policy != TRASH for policy, _ in gone):
        wrong.append(f"retention removed {sorted(gone)}")
    rows = list(connection.execute(sa.select(tables.revisions)))
    found = {(names[row.policy_id], row.digest.hex(), row.step): row.number for row in rows}
    if len(found) != len(rows):
        wrong.append("a revision is there twice")
    expected: set[tuple] = set()
    policies = {SHARED, TRASH}
    for by, line in deeds.items():
        adds = [tuple(add) for add in line.get("revisions", ())]
        there = [add in found or add[:2] in gone for add in adds]
        if "done" in line or any(there):
            expected.update(adds)
            policies.update(policy for policy, *_ in adds)
            if not all(there):
                wrong.append(f"{by}: a part of it is not there: {list(zip(adds, there))}")
        for policy, number, digest, step in line.get("done", ()):
            if (policy, digest) not in gone and found.get((policy, digest, step)) != number:
                wrong.append(f"{by}: acknowledged {policy}@{number} is not there")
        if "done" not in line and adds and any(there) != (by in authors):
            wrong.append(f"{by}: visible {any(there)}, in the audit log {by in authors}")
    wrong += [f"nobody said {key}" for key in found.keys() - expected]
    wrong += [f"nobody made policy {name}" for name in set(names.values()) - policies]
    if strangers := authors - deeds.keys() - {"nursery", "inspector"}:
        wrong.append(f"the audit log names {strangers}")
    rows = connection.execute(sa.select(tables.rollouts))
    there = [(names[row.policy_id], row.digest.hex()) for row in rows]
    may = {by: tuple(line["rollout"]) for by, line in deeds.items() if "rollout" in line}
    must = {one for by, one in may.items() if "done" in deeds[by]}
    if not must <= set(there) <= set(may.values()) or len(there) != len(set(there)):
        wrong.append(f"rollouts: lost {must - set(there)}, unknown {set(there) - must}")
    return wrong


def _aliases(connection: sa.Connection) -> list[str]:
    """The audit log, replayed, ends where the aliases are; every one names a live revision of its
    policy.
    """
    replayed: dict[tuple, tuple] = {}
    wrong: list[str] = []
    for row in connection.execute(
        sa.select(tables.audit).where(tables.audit.c.alias.is_not(None)).order_by(tables.audit.c.id)
    ):
        number, version = replayed.get((row.policy_id, row.alias), (None, 0))
        if (row.before, row.version) != (number, version + 1):
            wrong.append(
                f"audit {row.id}: move {row.version} from {row.before} after move {version} to"
                f" {number}"
            )
        replayed[row.policy_id, row.alias] = (row.after, row.version)
    query = sa.select(
        tables.aliases,
        tables.revisions.c.number,
        tables.revisions.c.policy_id.label("owner"),
        tables.revisions.c.state,
    )
    query = query.join_from(tables.aliases, tables.revisions, isouter=True)
    found: dict[tuple, Any] = {}
    for row in connection.execute(query):
        found[row.policy_id, row.name] = (row.number, row.version)
        if row.owner != row.policy_id or row.state != "live":
            wrong.append(f"alias {row.policy_id}@{row.name} points nowhere")
    if found != replayed:
        wrong.append(f"aliases {found.items() ^ replayed.items()} are not what the log says")
    return wrong


def _full(row: Any) -> str:
    return row.name if row.tenant == "default" else f"{row.tenant}/{row.name}"
