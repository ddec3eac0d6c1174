"""The console's pages, under ``/console``: policies, training, costs, the server's state, sign-in.

With scope admin a visitor sees and moves the policies of all tenants; others see their own, and
move aliases with scope train. Another tenant's policy gets the same error as a missing one.
"""

import urllib.parse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response
from starlette.routing import Route

from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records import names
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.errors import UserError
from mint_jax.service import endpoints
from mint_jax.service.binding import is_ours
from mint_jax.service.book import Model, NotFound
from mint_jax.service.checkpoints import found_or_none
from mint_jax.service.console import visit as visit_lib
from mint_jax.service.console.sessions import COOKIE, ROOT, SESSION_S, Browsers, covers
from mint_jax.service.console.visit import Visit
from mint_jax.service.costs import KINDS
from mint_jax.service.errors import Forbidden
from mint_jax.service.monitoring import state_of
from mint_jax.service.server import Server
from mint_jax.service.validation import Body, Natural, PageQuery

LISTED = 50  # policies of a page, likewise models, costs, and revisions on the device
REVISIONS = 20  # of a policy's page, likewise its audit log
CANARIES = 10  # of a policy's page, newest first
ROLLOUTS = 1000  # points of the curve of rewards
FREQUENT = ("rollout", "checkpoint")  # log entries that a job makes at every step
NO_SUCH_KEY = "This key is unknown, revoked or expired. Ask the server's operator for another."


def console_routes(server: Server, browsers: Browsers) -> list[Route]:
    """Returns the console's routes."""

    def sign_in_page(visit: Visit) -> Response:
        if browsers.keys is None:
            return visit.to(ROOT)
        return visit.page("sign_in.html", {"next": visit.query.get("next", ""), "error": ""})

    def sign_in(visit: Visit) -> Response:
        """Exchanges a key for a cookie."""
        if browsers.keys is None:
            raise UserError("this server has no keys: its console is open, to this machine")
        cookie, where = browsers.sign_in(visit.form.get("key", "")), visit.form.get("next", "")
        if cookie is None:
            return visit.page("sign_in.html", {"next": where, "error": NO_SUCH_KEY}, 401)
        response, request = visit.to(where if covers(where) else ROOT), visit.request
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_S,
            path=visit.root + ROOT,
            secure=request.url.scheme == "https" or not is_ours(request.headers.get("host", "")),
            httponly=True,
            samesite="strict",
        )
        return response

    def sign_out(visit: Visit) -> Response:
        browsers.sign_out(visit.session)
        return visit.to(f"{ROOT}/sign-in")

    pages = (sign_in_page, sign_in, sign_out, home, policies, policy, promote, rollback)
    pages += (training, costs, state)
    by_name = {page.__name__: page for page in pages}
    handlers = visit_lib.endpoints(server, browsers.keys is not None, by_name)
    handlers["static"] = visit_lib.static
    return endpoints.routes(endpoints.console_endpoints(), SimpleNamespace(**handlers))


def home(visit: Visit) -> Response:
    """Redirects to the first page."""
    return visit.to(f"{ROOT}/policies")


# -- policies


class PoliciesQuery(Body):
    match: Annotated[str, Field(max_length=names.LONGEST)] = ""
    after: str | None = None
    state: Literal["active", "retired"] | None = None


class PolicyQuery(Body):
    below: Natural | None = None
    before: Natural | None = None
    log: str = ""
    done: str = ""


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


def policy(visit: Visit) -> Response:
    (name, record, model), query = _find(visit), visit.fields(PolicyQuery)
    values: dict[str, Any] = {
        "name": name,
        "record": record,
        "model": model,
        "may_move": record is not None and record.state == "active" and _may_move(visit, name),
        "done": query.done,
        "curves": _curves(visit.server, record, model),
    }
    if record is not None:
        catalog, name, newest = visit.server.catalog, record.policy, record.revisions + 1
        first = max(0, min(query.below or newest, newest) - 1 - REVISIONS)
        revisions = catalog.revisions(name, first, REVISIONS)[::-1]
        limit, without = REVISIONS + 1, () if query.log == "all" else FREQUENT
        log = catalog.audit(name, newest=True, before=query.before, limit=limit, without=without)
        values |= {
            "config": Schema.from_json(record.schema).config,
            "revisions": revisions,
            "older": revisions[-1].number if revisions and revisions[-1].number > 1 else 0,
            "aliases": catalog.aliases(name),
            "scores": catalog.evaluations(name),
            "canaries": catalog.canaries(name, None, CANARIES),
            "log_of": "all" if query.log == "all" else "",
            "log": log[:REVISIONS],
            "log_before": log[REVISIONS - 1].id if len(log) > REVISIONS else 0,
        }
    return visit.page("policy.html", values)


def _find(visit: Visit) -> tuple[str, PolicyRecord | None, Model | None]:
    """Returns the name of a path's policy, its record if it was exported, and its model if it was
    trained here. Raises ``NotFound``.
    """
    name, server = visit.path["policy"], visit.server
    record = model = None
    parsed = found_or_none(names.parse_policy, name)
    if parsed is not None and visit.owner in (None, parsed[0]):
        name, model = names.full_name(*parsed), found_or_none(server.book.model, *parsed)
        record = found_or_none(server.catalog.policy, name)
    if record is None and model is None:
        raise NotFound(f"there is no policy {visit.path['policy'][:200]!r}")
    return name, record, model


def _curves(
    server: Server, record: PolicyRecord | None, model: Model | None
) -> dict[str, dict[str, Any]]:
    """Returns charts by name: x, y, the unit of x, and a description for screen readers."""
    points = [] if model is None else server.curves.of(model.id)
    rollouts = [] if record is None else server.catalog.rollouts(record.policy, ROLLOUTS)[::-1]
    updates = [number for number, _ in points]
    charts = {
        "loss": (updates, [point.loss for _, point in points], "update"),
        "gradient norm": (updates, [point.grad_norm for _, point in points], "update"),
        "reward": ([one.step for one in rollouts], [one.mean_reward for one in rollouts], "step"),
    }
    out = {}
    for kind, (x, y, unit) in charts.items():
        if known := [(at, value) for at, value in zip(x, y) if value is not None]:
            (first, start), (last, end) = known[0], known[-1]
            low, high = min(value for _, value in known), max(value for _, value in known)
            text = f"{start:.4g} at {unit} {first}, {end:.4g} at {unit} {last}"
            text += f"; between {low:.4g} and {high:.4g}"
            out[kind] = {"x": x, "y": y, "of": unit, "text": text}
    return out


def promote(visit: Visit) -> Response:
    revision = visit.form.get("revision", "")
    if not names.is_number(revision):
        raise UserError(f"revision is {revision[:40]!r}; expected its number")
    return _moved(visit, "promoted", visit.server.catalog.promote, int(revision))


def rollback(visit: Visit) -> Response:
    return _moved(visit, "rolled-back", visit.server.catalog.rollback)


def _moved(visit: Visit, done: str, move: Callable[..., Any], *revision: int) -> Response:
    """Moves an alias, for a reason, unless it has moved since the page was made."""
    name, record, _ = _find(visit)
    if not _may_move(visit, name):
        needed = "needs scope admin, or train and its tenant: use another key"
        raise Forbidden(f"moving an alias of {name!r} {needed}")
    if record is None:
        raise UserError(f"policy {name!r} has no revision yet: save one first")
    alias, why = visit.form.get("alias", "").strip(), visit.form.get("why", "").strip()
    if not why:
        raise UserError("the reason is empty: say why, for those who read the log")
    version = visit.form.get("version")
    for one in visit.server.catalog.aliases(name):
        if one.name == alias and version not in (None, str(one.version)):
            raise UserError(
                f"alias {alias!r} was moved to revision {one.number} meanwhile: look at it again"
            )
    move(name, *revision, alias, by=f"{visit.tenant} in the console", why=why)
    return visit.to(f"{ROOT}/policies/{urllib.parse.quote(name)}?done={done}")


def _may_move(visit: Visit, policy: str) -> bool:
    owner, _ = names.parse_policy(policy)
    return visit.may("admin") or (visit.may("train") and owner == visit.tenant)


# -- training, costs, the server


def training(visit: Visit) -> Response:
    """Shows a page of the tenant's models, newest first."""
    book, offset = visit.server.book, visit.fields(PageQuery).offset
    count = book.count_models(visit.tenant)
    values = {
        "models": book.models(visit.tenant, LISTED, offset),
        "count": count,
        "offset": offset,
        "before": max(0, offset - LISTED),
        "next": offset + LISTED if offset + LISTED < count else 0,
    }
    return visit.page("training.html", values)


def costs(visit: Visit) -> Response:
    """Shows the policies and tenants with the highest costs; operators see all tenants."""
    kinds = ("policy",) if visit.owner is not None else ("tenant", "policy")
    listed = visit.server.costs.listed
    tables = {by: list(listed(by, visit.owner, LISTED, 0).items()) for by in kinds}
    return visit.page("costs.html", {"tables": tables, "kinds": KINDS, "most": LISTED})


def state(visit: Visit) -> Response:
    """Shows residency and queues of all tenants."""
    server, found = visit.server, state_of(visit.server)
    resident = found["residency"]["resident"]
    served = {tenant: cost.seconds for tenant, cost in server.costs.since_start().items()}
    values = {
        "state": found,
        "sizes": server.sizes,
        "unfinished": server.engine.in_flight().total(),
        "resident": [(digest, *_named(server, digest)) for digest in resident[:LISTED]],
        "more": max(0, len(resident) - LISTED),
        "served": sorted(served.items(), key=lambda one: -one[1]),
    }
    return visit.page("server_state.html" if visit.part else "server.html", values)


def _named(server: Server, digest: str) -> tuple[str, str]:
    """Returns name and policy of a revision; outside the catalog its loaded names and no policy."""
    found: Any = found_or_none(server.catalog.resolve, digest)
    if found is not None:
        return f"{found.policy}@{found.number}", found.policy
    return ", ".join(name for name in server.weights.names_of(digest) if name != digest), ""
