"""A run's first words to the catalog: who it is, which policies it trains, and where they stood before it.

The run's identity is in its workdir, so a run that was killed takes its own policies back at once, and another run of the same
policies is refused until this one has ended. Was it killed on another machine, which cannot be asked, the run waits until its
sessions have expired, ``recorder.SESSION_S`` seconds after it last renewed them; one that goes on renewing them is alive.
Where a policy began, and what its rollouts are drawn from, is looked up once: a run that is killed and started again does
not begin elsewhere because an alias moved meanwhile.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mint_jax import multihost
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records import Lease, Session
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.jobs import common
from mint_jax.jobs.catalogs import JobCatalog
from mint_jax.jobs.hold import Hold
from mint_jax.jobs.recorder import SESSION_S, Recorder
from mint_jax.lora import peft

POLL_S = 1.0


class Claimed(NamedTuple):
    """What ``claim_policies`` found.

    Attributes:
        start: digest of the revision from which a policy goes on, by the catalog's names; none for a new policy.
        fixed: digest or PEFT directory that a policy's rollouts are drawn from.
        references: that of the reference of its loss.
        recorder: process 0's, holding a session per policy; None elsewhere.
    """

    start: dict[str, str]
    fixed: dict[str, str]
    references: dict[str, str]
    recorder: Recorder | None


def claim_policies(
    catalog: JobCatalog,
    schemas: Mapping[str, Schema],
    file: Path,
    rollout_revisions: Mapping[str, str],
    hold: Hold | None,
    references: Mapping[str, str] | None = None,
) -> Claimed:
    """Makes the records that are missing and opens the sessions; all processes call it.

    Args:
        schemas: of the policies, by the catalog's names.
        file: where the run's identity is kept.
        rollout_revisions, references: names of revisions or PEFT directories, by policy.
        hold: process 0's, on the folder of ``file``.

    Raises:
        UserError: a policy is trained by another run, or by this one on another machine; it is retired, or of another base or
            adapter config; an unknown revision.
    """
    recorder: Recorder | None = None

    def begin() -> list[dict[str, str]]:
        nonlocal recorder
        main = catalog.main
        run = _read(file)
        if "id" not in run:
            run = _write(file, {"id": uuid.uuid4().hex})
        assert hold is not None
        mine = f"run {run['id']} on {hold.me.machine}"
        owner, why = f"{mine}, {hold.me}", str(file.parent.absolute())
        for name, schema in schemas.items():
            _check_record(main, name, schema, why)
        sessions: dict[str, Session] = {}
        leases: list[Lease] = []
        try:
            for name in schemas:
                sessions[name] = _open_session(main, name, owner, f"run {run['id']} ", mine if hold.sure else None, why)
            if "start" not in run:
                fixed = {name: _digest(main, text) for name, text in rollout_revisions.items()}
                referred = {name: _digest(main, text) for name, text in (references or {}).items()}
                run = _write(file, run | {"start": _newest(main, schemas), "fixed": fixed, "references": referred})
            named = run.get("references", {})
            needed = [*run["fixed"].values(), *named.values()]
            leases += [main.lease(d, owner, SESSION_S) for d in dict.fromkeys(needed) if not peft.is_peft(Path(d))]
            recorder = Recorder(main, sessions, leases, run["start"])
        except BaseException:
            for lease in leases:
                main.release(lease)
            for session in sessions.values():
                main.close_session(session)
            raise
        return [{name: old["digest"] for name, old in run["start"].items()}, run["fixed"], named]

    start, fixed, named = multihost.agree("policies in the catalog", begin)
    return Claimed(start, fixed, named, recorder)


def _open_session(main: Catalog, name: str, owner: str, mine: str, gone: str | None, why: str) -> Session:
    """A policy's session. Where this very run has it on another machine, waits until that one proves dead, or alive.

    Args:
        mine: what the names of all owners of this run begin with; ``gone``: of those that are known to have ended.
    """
    until: float | None = None
    while True:
        try:
            return main.open_session(name, owner, SESSION_S, instead_of=gone, why=why)
        except UserError:
            record = main.policy(name)
            if not (record.session_owner or mine).startswith(mine) or until not in (None, record.session_expires or until):
                raise
            if until is None:
                common.say(f"policy {name} is held by {record.session_owner}: waiting up to {SESSION_S:.0f} s for a sign of life of it")
                until = record.session_expires
        time.sleep(POLL_S)


def _check_record(main: Catalog, name: str, schema: Schema, why: str) -> None:
    try:
        record = main.policy(name)
    except UserError:  # not there yet; what else may be wrong, making it says again
        main.create_policy(name, schema, why=why)
        return
    there = Schema.from_json(record.schema)
    if there.base != schema.base:
        raise UserError(
            f"policy {name!r} of the catalog is of base {there.base[:12]}, this run's is {schema.base[:12]}: choose another name, tenant "
            "or catalog"
        )
    for field in dataclasses.fields(schema.config):
        had, wanted = getattr(there.config, field.name), getattr(schema.config, field.name)
        if had != wanted:
            raise UserError(
                f"policy {name!r} of the catalog has {field.name} {had!r}, this config says {wanted!r}: repeat the former, or choose "
                "another name, tenant or catalog"
            )


def _newest(main: Catalog, names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Digest, number and step of the newest revision of those policies that have one."""
    found = {}
    for name in names:
        if main.policy(name).revisions:
            newest = main.revision(name, "latest")
            found[name] = {"digest": newest.digest, "number": newest.number, "step": newest.step}
    return found


def _digest(main: Catalog, text: str) -> str:
    return text if "@" not in text and peft.is_peft(Path(text)) else main.resolve(text).digest


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(f"{file} is damaged: it names this run to the catalog; choose another --workdir") from None


def _write(file: Path, run: dict[str, Any]) -> dict[str, Any]:
    write_file(file, json.dumps(run))
    return run
