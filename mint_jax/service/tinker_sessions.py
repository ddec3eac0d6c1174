"""Tinker's session requests: search, projects, and a session's timeline as a trace.

A project is only a label here: a tenant has access to all projects.
"""

import datetime
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.service.book import Session
from mint_jax.service.handlers import body_of, tenant_of
from mint_jax.service.server import Server
from mint_jax.service.tinker_types import AssignProject, SearchSessions, Status
from mint_jax.service.validation import wrong

TRACE = "trace.json"  # a link's file name; the trace is made when the link is followed
EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
MICROSECOND = datetime.timedelta(microseconds=1)
REASONS = ("success", "errored", "interrupted")  # of clients that finish a session


class Sessions:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server = server

    async def search(self, request: Request) -> Response:
        """Answers with a page of the tenant's sessions that match, newest first."""
        query, tenant = await body_of(SearchSessions, request), tenant_of(request)
        limit = query.limit or 50
        fits, before = _filter(query, tenant), _cursor(query)
        every = sorted(self.server.book.sessions(tenant), key=_place, reverse=True)
        matches = (one for one in every if (not before or _place(one) < before) and fits(one))
        found = list(itertools.islice(matches, limit + 1))
        page, cursor = [self._summary(one) for one in found[:limit]], None
        if len(found) > limit:
            last = page[-1]
            cursor = {"last_created_at": last["created_at"], "last_session_id": last["session_id"]}
        return JSONResponse({"sessions": page, "next_cursor": cursor})

    def _summary(self, session: Session) -> dict[str, Any]:
        count, nbytes = self.server.book.checkpoint_totals(session.tenant, session.id)
        notes = session.details
        return {
            "session_id": session.id,
            "created_at": _iso(_place(session)[0]),
            "owner": session.tenant,
            "project_id": notes.get("project_id") or "",
            "status": _status(session),
            "checkpoints_count": count,
            "checkpoint_storage_bytes": nbytes,
            "display_name": notes.get("display_name"),
            "user_metadata": notes.get("user_metadata"),
        }

    async def project(self, request: Request) -> Response:
        """Moves a session, and with it its runs, into a project."""
        session = self.server.book.session(tenant_of(request), request.path_params["session"])
        project = (await body_of(AssignProject, request)).project_id
        self.server.book.update_session(session, project_id=project[:1000])
        return JSONResponse({})

    async def trace_export(self, request: Request) -> Response:
        """Answers with a link to the session's timeline, valid without a key for an hour."""
        session = self.server.book.session(tenant_of(request), request.path_params["session"])
        token = self.server.links.make(f"{session.tenant}/{session.id}", TRACE)
        url = request.url_for("file", token=token)
        return JSONResponse({"status": "ready", "url": str(url)})


def trace_of(server: Server, tenant: str, id: str) -> bytes:
    """Returns a session's timeline in Chrome's trace format, for https://ui.perfetto.dev.

    There is a row for each model, with its lifetime, its updates with loss and gradient norm, and
    its checkpoints, and one for each sampler. Times of single requests are not kept.
    """
    book = server.book
    session, events = book.session(tenant, id), []
    now = book.clock()

    def add(row: int, kind: str, name: str, at: float, args: Any, **more: Any) -> None:
        event = {"pid": 1, "tid": row, "ph": kind, "name": name, "ts": round(1e6 * at)}
        events.append(event | {"args": args} | more)

    def life(row: int, name: str, begin: float, end: float | None, args: Mapping[str, Any]) -> None:
        add(row, "M", "thread_name", 0, {"name": name})
        end = now if end is None else end
        add(row, "X", name, begin, args, dur=round(1e6 * (end - begin)))

    life(0, f"session {id}", session.created, session.ended, session.details)
    rows = 0
    for rows, name in enumerate(book.models_of(tenant, id), 1):
        model = book.model(tenant, name)
        life(rows, model.id, model.created, model.ended, {"rank": model.details.get("rank")})
        for number, point in server.curves.of(model.id, 10_000):
            args = {"number": number, "loss": point.loss, "grad_norm": point.grad_norm}
            add(rows, "i", "update", point.at, args, s="t")
        for saved in book.checkpoints(tenant, model.id):
            name, args = f"{saved.kind}/{saved.name}", {"bytes": saved.nbytes}
            add(rows, "i", name, saved.created, args, s="t")
    for row, name in enumerate(book.samplers_of(tenant, id), rows + 1):
        sampler = server.sampler(tenant, name)
        life(row, sampler.id, sampler.created, session.ended, {"path": sampler.path})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def _place(session: Session) -> tuple[int, str]:
    """Returns the sort key of a session: creation in microseconds, as in a cursor, and id."""
    return round(1e6 * session.created), session.id


def _iso(microseconds: int) -> str:
    return (EPOCH + microseconds * MICROSECOND).isoformat()


def _cursor(query: SearchSessions) -> tuple[int, str] | None:
    at = query.cursor
    return at and ((at.last_created_at - EPOCH) // MICROSECOND, at.last_session_id)


def _status(session: Session) -> dict[str, Any] | None:
    """Returns a session's status; None if it ended without a request of its client."""
    if session.ended is None:
        return {"type": "active"}
    reason, detail = session.details.get("finished"), session.details.get("detail")
    finished = {"type": "client_finished", "reason": {"type": reason}, "detail": detail}
    return None if reason is None else finished


def _filter(query: SearchSessions, tenant: str) -> Callable[[Session], bool]:
    """Returns a predicate of the sessions that match a search."""
    words = None if query.display_name is None else query.display_name.lower().split()
    owner, owners = query.owner, {tenant}
    if owner is not None and owner.type == "user":
        if owner.owner_urns is None:
            raise wrong("owner.owner_urns", None, "a list of owners")
        owners = set(owner.owner_urns)

    def fits(session: Session) -> bool:
        notes = session.details
        projects, metadata = query.project_ids, notes.get("user_metadata") or {}
        if session.tenant not in owners:
            return False
        if projects is not None and notes.get("project_id") not in projects:
            return False
        if any(metadata.get(key) != value for key, value in (query.user_metadata or {}).items()):
            return False
        status = _status(session)
        if query.statuses is not None and not any(_has(one, status) for one in query.statuses):
            return False
        name = (notes.get("display_name") or "").lower()
        matches = [session.id == query.session_id] * (query.session_id is not None)
        matches += [] if words is None else [all(word in name for word in words)]
        return not matches or any(matches)

    return fits


def _has(wanted: Status, found: Mapping[str, Any] | None) -> bool:
    """Returns whether a session has a status; none has failed or was cancelled here."""
    if found is None or found["type"] != wanted.type:
        return False
    reasons = REASONS if wanted.reasons is None else wanted.reasons
    return wanted.type != "client_finished" or found["reason"]["type"] in reasons
