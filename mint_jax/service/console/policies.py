"""Policies in the console: listed and searched, one with its lineage and curves, promoted and
rolled back.

With scope admin a visitor sees and moves the policies of all tenants; others see their own, and
move aliases with scope train. Another tenant's policy gets the same error as a missing one.
"""

import urllib.parse
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from starlette.responses import JSONResponse, Response

from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records import names
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.errors import UserError
from mint_jax.service.book import Model, NotFound
from mint_jax.service.checkpoints import found_or_none
from mint_jax.service.console.pages import Visit
from mint_jax.service.console.sessions import ROOT
from mint_jax.service.errors import Forbidden
from mint_jax.service.handlers import Natural
from mint_jax.service.validation import Body

LISTED = 50  # policies of a page
REVISIONS = 20  # of a policy's page, likewise its audit log
BRANCHES = 20
ANCESTORS = 10
ROLLOUTS = 1000  # points of the curve of rewards
FREQUENT = ("rollout", "checkpoint")  # log entries that a job makes at every step


class PoliciesQuery(Body):
    match: Annotated[str, Field(max_length=names.LONGEST)] = ""
    after: str | None = None
    state: Literal["active", "retired"] | None = None


class PolicyQuery(Body):
    below: Natural | None = None
    before: Natural | None = None
    log: str = ""
    done: str = ""


class VisiblePolicy(NamedTuple):
    """A policy that a visitor may see: exported (``record``), trained here (``model``), or both."""

    name: str
    record: PolicyRecord | None
    model: Model | None


def policies(visit: Visit) -> Response:
    """Shows a page of policies that match a search."""
    query, catalog = visit.fields(PoliciesQuery), visit.server.catalog
    page = catalog.policies(visit.owner, query.after, LISTED + 1, query.state, query.match)
    listed = page[:LISTED]
    values = {
        "policies": [(one, Schema.from_json(one.schema).config) for one in listed],
        "aliases": catalog.aliases_of(listed),
        "match": query.match,
        "state": query.state or "",
        "next": listed[-1].policy if len(page) > LISTED else "",
        "first": query.after is None,
    }
    return visit.page("policies_rows.html" if visit.part else "policies.html", values)


def curves(visit: Visit) -> Response:
    return JSONResponse(_curves(visit, _find(visit)))


def promote(visit: Visit) -> Response:
    def move(policy: str, alias: str, **log: str) -> None:
        revision = visit.form.get("revision", "")
        if not names.is_number(revision):
            raise UserError(f"revision is {revision[:40]!r}; expected its number")
        visit.server.catalog.promote(policy, int(revision), alias, **log)

    return _moved(visit, "promoted", move)


def rollback(visit: Visit) -> Response:
    return _moved(visit, "rolled-back", visit.server.catalog.rollback)


def _find(visit: Visit) -> VisiblePolicy:
    """Returns the policy of a path. Raises ``NotFound``."""
    name, server = visit.path["policy"], visit.server
    record = model = None
    parsed = found_or_none(names.parse_policy, name)
    if parsed is not None and visit.owner in (None, parsed[0]):
        name, model = names.full_name(*parsed), found_or_none(server.book.model, *parsed)
        record = found_or_none(server.catalog.policy, name)
    if record is None and model is None:
        raise NotFound(f"there is no policy {visit.path['policy'][:200]!r}")
    return VisiblePolicy(name, record, model)


def policy(visit: Visit) -> Response:
    policy, query = _find(visit), visit.fields(PolicyQuery)
    record = policy.record
    values: dict[str, Any] = {
        "name": policy.name,
        "record": record,
        "model": policy.model,
        "may_move": record is not None and record.state == "active" and _may_move(visit, policy),
        "done": query.done,
        "summaries": {kind: summary(curve) for kind, curve in _curves(visit, policy).items()},
    }
    if record is not None:
        catalog, name, newest = visit.server.catalog, record.policy, record.revisions + 1
        first = max(0, min(query.below or newest, newest) - 1 - REVISIONS)
        revisions = catalog.revisions(name, first, REVISIONS)[::-1]
        limit, without = REVISIONS + 1, () if query.log == "all" else FREQUENT
        log = catalog.audit(name, newest=True, before=query.before, limit=limit, without=without)
        values |= {
            "config": Schema.from_json(record.schema).config,
            "ancestors": list(_ancestors(visit, record)),
            "branches": catalog.branches(name, visit.owner, BRANCHES),
            "revisions": revisions,
            "older": revisions[-1].number if revisions and revisions[-1].number > 1 else 0,
            "aliases": catalog.aliases(name),
            "scores": catalog.evaluations(name),
            "log_of": "all" if query.log == "all" else "",
            "log": log[:REVISIONS],
            "log_before": log[REVISIONS - 1].id if len(log) > REVISIONS else 0,
        }
    return visit.page("policy.html", values)


def _ancestors(visit: Visit, record: PolicyRecord) -> Iterator[tuple[str, str]]:
    """Yields name and policy of the revisions that a policy descends from, if visible."""
    for _ in range(ANCESTORS):
        if record.parent is None:
            return
        policy = record.parent.rpartition("@")[0]
        if visit.owner not in (None, names.parse_policy(policy)[0]):
            yield "a revision of another tenant", ""
            return
        yield record.parent, policy
        record = visit.server.catalog.policy(policy)


def _curves(visit: Visit, policy: VisiblePolicy) -> dict[str, dict[str, Any]]:
    """Returns charts by name: x, y, and the unit of x."""
    server, model = visit.server, policy.model
    points = [] if model is None else server.curves.of(model.id)
    rollouts = [] if policy.record is None else server.catalog.rollouts(policy.name, ROLLOUTS)[::-1]
    updates = [number for number, _ in points]
    charts = {
        "loss": (updates, [point.loss for _, point in points], "update"),
        "gradient norm": (updates, [point.grad_norm for _, point in points], "update"),
        "reward": ([one.step for one in rollouts], [one.mean_reward for one in rollouts], "step"),
    }
    return {
        kind: {"x": x, "y": y, "of": of}
        for kind, (x, y, of) in charts.items()
        if any(value is not None for value in y)
    }


def summary(curve: dict[str, Any]) -> str:
    """Describes a curve in words, for screen readers."""
    known = [(x, y) for x, y in zip(curve["x"], curve["y"]) if y is not None]
    (first, start), (last, end) = known[0], known[-1]
    low, high, unit = min(y for _, y in known), max(y for _, y in known), curve["of"]
    return (
        f"{start:.4g} at {unit} {first}, {end:.4g} at {unit} {last}; between {low:.4g} and"
        f" {high:.4g}"
    )


def _moved(visit: Visit, done: str, move: Callable[..., Any]) -> Response:
    """Moves an alias, for a reason, unless it has moved since the page was made."""
    policy = _find(visit)
    if not _may_move(visit, policy):
        raise Forbidden(
            f"moving an alias of {policy.name!r} needs scope admin, or train and its tenant:"
            " use another key"
        )
    if policy.record is None:
        raise UserError(f"policy {policy.name!r} has no revision yet: save one first")
    alias, why = visit.form.get("alias", "").strip(), visit.form.get("why", "").strip()
    if not why:
        raise UserError("the reason is empty: say why, for those who read the log")
    version = visit.form.get("version")
    for one in visit.server.catalog.aliases(policy.name):
        if one.name == alias and version not in (None, str(one.version)):
            raise UserError(
                f"alias {alias!r} was moved to revision {one.number} meanwhile: look at it again"
            )
    move(policy.name, alias, by=f"{visit.tenant} in the console", why=why)
    return visit.to(f"{ROOT}/policies/{urllib.parse.quote(policy.name)}?done={done}")


def _may_move(visit: Visit, policy: VisiblePolicy) -> bool:
    owner, _ = names.parse_policy(policy.name)
    return visit.may("admin") or (visit.may("train") and owner == visit.tenant)
