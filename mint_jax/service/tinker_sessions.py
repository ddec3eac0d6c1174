"""Tinker's requests about sessions: lists, search, projects, and a session's timeline as a trace.

A project is a label here: every tenant has all that it names.
"""

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mint_jax.errors import UserError, choice
from mint_jax.service.asking import Handler, given, tenant_of, told_in
from mint_jax.service.book import Session
from mint_jax.service.server import Server
from mint_jax.service.wire.reading import integer, mapping, sequence, shown, text

TRACE = "trace.json"  # of a link; made when somebody follows it
REASONS = ("success", "errored", "interrupted")  # for which a client says that it has finished
LONGEST_PAGE = 200


class Sessions:
    """The handlers over one server."""

    def __init__(self, server: Server):
        self.server = server

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            ("POST", "sessions/search", self.search),
            ("PUT", "sessions/{session}/project", self.assign),
            ("GET", "sessions/{session}/trace_export", self.export),
        ]
        return [
            Route(f"/api/v1/{path}", handler, methods=[method]) for method, path, handler in table
        ]

    async def search(self, request: Asked) -> Response:
        """Answers with a page of the tenant's sessions that match, the newest first."""
        told, tenant = await told_in(request), tenant_of(request)
        limit = integer(
            50 if told.get("limit") is None else told["limit"], "limit", 1, LONGEST_PAGE
        )
        fits, before = _filter(told, tenant), _cursor(told)
        found = []
        for session in sorted(self.server.book.sessions(tenant), key=_place, reverse=True):
            if (before is None or _place(session) < before) and fits(session):
                found.append(session)
                if len(found) > limit:
                    break
        more = len(found) > limit
        last = found[limit - 1] if more else None
        cursor = (
            None
            if last is None
            else {"last_created_at": _iso(_place(last)[0]), "last_session_id": last.id}
        )
        return JSONResponse(
            {"sessions": [self._summary(one) for one in found[:limit]], "next_cursor": cursor}
        )

    def _summary(self, session: Session) -> dict[str, Any]:
        count, nbytes = self.server.book.checkpoint_totals(session.tenant, session.id)
        told = session.details
        return {
            "session_id": session.id,
            "created_at": _iso(_place(session)[0]),
            "owner": session.tenant,
            "project_id": told.get("project_id") or "",
            "status": _status(session),
            "checkpoints_count": count,
            "checkpoint_storage_bytes": nbytes,
            "display_name": told.get("display_name"),
            "user_metadata": told.get("user_metadata"),
        }

    async def assign(self, request: Asked) -> Response:
        """Moves a session, and with it its runs, into a project."""
        session = self.server.book.session(tenant_of(request), request.path_params["session"])
        project = text((await told_in(request)).get("project_id"), "project_id")
        self.server.book.update_session(session, project_id=project[:1000])
        return JSONResponse({})

    async def export(self, request: Asked) -> Response:
        """Answers with a link to the session's timeline, which needs no key and is good for an
        hour.
        """
        session = self.server.book.session(tenant_of(request), request.path_params["session"])
        url = request.url_for(
            "file", token=self.server.links.make(f"{session.tenant}/{session.id}", TRACE)
        )
        return JSONResponse({"status": "ready", "url": str(url)})


def trace_of(server: Server, tenant: str, id: str) -> bytes:
    """Returns a session's timeline in the JSON of Chrome's traces, which https://ui.perfetto.dev
    opens.

    A row for each model, with its life, its updates with loss and gradient's norm, and its
    checkpoints; one for each sampler. Times of single requests are not kept.
    """
    book = server.book
    session, events = book.session(tenant, id), []
    now = book.clock()

    def add(row: int, kind: str, name: str, at: float, **more: Any) -> None:
        events.append(
            {"pid": 1, "tid": row, "ph": kind, "name": name, "ts": round(1e6 * at)} | more
        )

    def life(row: int, name: str, begin: float, end: float | None, args: Mapping[str, Any]) -> None:
        events.append(
            {"pid": 1, "tid": row, "ph": "M", "name": "thread_name", "args": {"name": name}}
        )
        add(
            row,
            "X",
            name,
            begin,
            dur=round(1e6 * ((now if end is None else end) - begin)),
            args=args,
        )

    life(0, f"session {id}", session.created, session.ended, session.details)
    rows = 0
    for rows, model in enumerate(
        (book.model(tenant, one) for one in book.models_of(tenant, id)), 1
    ):
        life(rows, model.id, model.created, model.ended, {"rank": model.details.get("rank")})
        for number, point in book.points(model.id, 10_000):
            add(
                rows,
                "i",
                "update",
                point.at,
                s="t",
                args={"number": number, "loss": point.loss, "grad_norm": point.grad_norm},
            )
        for saved in book.checkpoints(tenant, model.id):
            add(
                rows,
                "i",
                f"{saved.kind}/{saved.name}",
                saved.created,
                s="t",
                args={"bytes": saved.nbytes},
            )
    for row, sampler in enumerate(
        (server.sampler(tenant, one) for one in book.samplers_of(tenant, id)), rows + 1
    ):
        life(row, sampler.id, sampler.created, session.ended, {"path": sampler.path})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def _place(session: Session) -> tuple[int, str]:
    """Orders sessions by when they were made: microseconds, which a cursor's time has too, and the
    id.
    """
    return round(1e6 * session.created), session.id


def _iso(microseconds: int) -> str:
    seconds, rest = divmod(microseconds, 10**6)
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC).replace(microsecond=rest).isoformat()
    )


def _cursor(told: Mapping[str, Any]) -> tuple[int, str] | None:
    if (cursor := given(told, "cursor", mapping)) is None:
        return None
    at = text(cursor.get("last_created_at"), "cursor.last_created_at")
    try:
        moment = datetime.datetime.fromisoformat(at)
        since = moment - datetime.datetime.fromtimestamp(0, datetime.UTC)
    except (ValueError, TypeError):
        raise UserError(
            f"cursor.last_created_at is {shown(at)}; expected a next_cursor as it was given"
        ) from None
    return since // datetime.timedelta(microseconds=1), text(
        cursor.get("last_session_id"), "cursor.last_session_id"
    )


def _status(session: Session) -> dict[str, Any] | None:
    """None where it ended without a word of its client."""
    if session.ended is None:
        return {"type": "active"}
    reason = session.details.get("finished")
    return (
        None
        if reason is None
        else {
            "type": "client_finished",
            "reason": {"type": reason},
            "detail": session.details.get("detail"),
        }
    )


def _filter(told: Mapping[str, Any], tenant: str) -> Callable[[Session], bool]:
    """Returns whether a session is what a search asks for."""
    id, name = given(told, "session_id", text), given(told, "display_name", text)
    words = None if name is None else name.lower().split()
    projects = given(told, "project_ids", sequence)
    metadata = given(told, "user_metadata", mapping) or {}
    owner = given(told, "owner", mapping) or {}
    owners = {tenant}
    if (kind := owner.get("type", "own")) not in ("own", "accessible", "user"):
        raise choice("owner.type", str(kind)[:80], ("own", "accessible", "user"))
    if kind == "user":
        owners = {
            text(one, "owner.owner_urns")
            for one in sequence(owner.get("owner_urns"), "owner.owner_urns")
        }
    statuses = (
        None
        if told.get("statuses") is None
        else [_wanted(one) for one in sequence(told["statuses"], "statuses")]
    )

    def fits(session: Session) -> bool:
        mine = session.details
        if session.tenant not in owners or (
            projects is not None and mine.get("project_id") not in projects
        ):
            return False
        if any(
            (mine.get("user_metadata") or {}).get(key) != value for key, value in metadata.items()
        ):
            return False
        if statuses is not None and not any(wanted(_status(session)) for wanted in statuses):
            return False
        called = (mine.get("display_name") or "").lower()
        matches = [session.id == id] * (id is not None) + (
            [] if words is None else [all(word in called for word in words)]
        )
        return not matches or any(matches)

    return fits


def _wanted(told: Any) -> Callable[[Mapping[str, Any] | None], bool]:
    """Returns whether a session's status is one that a search names. None here has failed or was
    cancelled.
    """
    status = mapping(told, "statuses")
    kinds = ("active", "cancelled", "failed", "client_finished")
    if (kind := status.get("type")) not in kinds:
        raise choice("statuses.type", str(kind)[:80], kinds)
    reasons = (
        REASONS
        if status.get("reasons") is None
        else sequence(status["reasons"], "statuses.reasons")
    )
    if unknown := [one for one in reasons if one not in REASONS]:
        raise choice("statuses.reasons", str(unknown[0])[:80], REASONS)
    return lambda found: (
        found is not None
        and found["type"] == kind
        and (kind != "client_finished" or found["reason"]["type"] in reasons)
    )
