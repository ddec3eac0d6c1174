"""Tinker's REST endpoints: lists of runs, sessions and checkpoints; sessions searched, moved into
projects and exported as a trace; checkpoints published, copied, deleted and downloaded.

A project is only a label here: a tenant has access to all projects.
"""

import asyncio
import datetime
import itertools
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service import checkpoints, external
from mint_jax.service.book import Checkpoint, Model, NotFound, Session, iso
from mint_jax.service.handlers import body_of, tenant_of
from mint_jax.service.queries import MAX_LISTED, PageQuery, RunsQuery, query_of
from mint_jax.service.server import Server
from mint_jax.service.tinker_types import (
    REASONS,
    AssignProject,
    CopyWeights,
    SearchSessions,
    SetTtl,
    Status,
    WeightsInfo,
)
from mint_jax.service.validation import wrong

TRACE = "trace.json"  # a link's file name; the trace is made when the link is followed
EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
MICROSECOND = datetime.timedelta(microseconds=1)


class Rest:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server = server

    # -- runs and sessions

    async def training_runs(self, request: Request) -> Response:
        query = query_of(RunsQuery, request)
        (limit, offset), project = _page(query), query.project_id
        book, tenant = self.server.book, tenant_of(request)
        found = [self._run(model, tenant) for model in book.models(tenant, limit, offset, project)]
        return _listed("training_runs", found, offset, limit, book.count_models(tenant, project))

    async def training_run(self, request: Request) -> Response:
        tenant = tenant_of(request)
        model = self.server.book.model(tenant, request.path_params["model"])
        return JSONResponse(self._run(model, tenant))

    def _run(self, model: Model, tenant: str) -> dict[str, Any]:
        saved = self.server.book.checkpoints(tenant, model.id)
        newest = {
            kind: next((_shown(row) for row in saved if row.kind == kind), None)
            for kind in checkpoints.KINDS
        }
        latest = max([model.created, *(row.created for row in saved)])
        return {
            "training_run_id": model.id,
            "base_model": self.server.name,
            "model_owner": tenant,
            "is_lora": True,
            "lora_rank": model.details.get("rank"),
            "corrupted": False,
            "last_request_time": iso(latest),
            "last_checkpoint": newest["weights"],
            "last_sampler_checkpoint": newest["sampler_weights"],
            "user_metadata": model.details.get("metadata"),
        }

    async def sessions(self, request: Request) -> Response:
        found = self.server.book.sessions(tenant_of(request), *_page(query_of(PageQuery, request)))
        return JSONResponse({"sessions": [session.id for session in found]})

    async def session(self, request: Request) -> Response:
        book, tenant = self.server.book, tenant_of(request)
        found = book.session(tenant, request.path_params["session"])
        notes = {name: found.details.get(name) for name in ("user_metadata", "display_name")}
        runs, samplers = book.models_of(tenant, found.id), book.samplers_of(tenant, found.id)
        return JSONResponse({"training_run_ids": runs, "sampler_ids": samplers} | notes)

    async def search(self, request: Request) -> Response:
        """Answers with a page of the tenant's sessions that match, newest first."""
        query, tenant = await body_of(SearchSessions, request), tenant_of(request)
        limit, after = query.limit or 50, query.cursor
        owner = query.owner
        owners = [tenant] if owner is None or owner.type != "user" else owner.owner_urns
        if owners is None:
            raise wrong("owner.owner_urns", None, "a list of owners")
        every = sorted(self.server.book.sessions(tenant), key=_place, reverse=True)
        every = every if tenant in owners else []
        if after is not None:
            end = (after.last_created_at - EPOCH) // MICROSECOND, after.last_session_id
            every = [one for one in every if _place(one) < end]
        found = list(itertools.islice((one for one in every if _fits(query, one)), limit + 1))
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
            "created_at": (EPOCH + _place(session)[0] * MICROSECOND).isoformat(),
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

    # -- checkpoints

    async def checkpoints(self, request: Request) -> Response:
        limit, offset = _page(query_of(PageQuery, request))
        book, tenant = self.server.book, tenant_of(request)
        found = [_shown(row) for row in book.checkpoints(tenant, limit=limit, offset=offset)]
        return _listed("checkpoints", found, offset, limit, book.checkpoint_totals(tenant)[0])

    async def checkpoints_of(self, request: Request) -> Response:
        book, tenant = self.server.book, tenant_of(request)
        model = book.model(tenant, request.path_params["model"])
        found = [_shown(row) for row in book.checkpoints(tenant, model.id)]
        return JSONResponse({"checkpoints": found})

    def _row(self, request: Request) -> Checkpoint:
        path = request.path_params
        return self.server.book.checkpoint(
            tenant_of(request), path["model"], path["kind"], path["name"]
        )

    async def delete(self, request: Request) -> Response:
        await asyncio.to_thread(self.server.checkpoints.remove, self._row(request))
        return Response(status_code=204)

    async def publish(self, request: Request) -> Response:
        self.server.book.change_checkpoint(self._row(request), public=True)
        return JSONResponse({})

    async def unpublish(self, request: Request) -> Response:
        self.server.book.change_checkpoint(self._row(request), public=False)
        return JSONResponse({})

    async def ttl(self, request: Request) -> Response:
        row, body = self._row(request), await body_of(SetTtl, request)
        seconds = checkpoints.check_ttl(body.ttl_seconds)
        book = self.server.book
        book.change_checkpoint(row, expires=None if seconds is None else book.clock() + seconds)
        return JSONResponse({})

    async def external_weights_urls(self, request: Request) -> Response:
        row, links = self._row(request), self.server.links
        if row.kind != "external_weights":
            raise UserError(
                f"{row.path} has no files to download; save_weights_external makes some"
            )
        try:
            found = sorted(path.name for path in (links.folder / row.digest).iterdir())
        except FileNotFoundError:  # removed since its row was read
            raise NotFound(f"there is no checkpoint {row.path}") from None
        made = {
            name: str(request.url_for("file", token=links.make(row.digest, name))) for name in found
        }
        return JSONResponse(
            {"urls": made, "expires": iso(self.server.book.clock() + external.LINK_S)}
        )

    async def file(self, request: Request) -> Response:
        path = self.server.links.follow(request.path_params["token"])
        if path.name == TRACE:
            tenant, session = path.parent.parent.name, path.parent.name
            trace = await asyncio.to_thread(trace_of, self.server, tenant, session)
            return Response(trace, media_type="application/json")
        if not path.is_file():
            raise NotFound("the checkpoint of this link was deleted: save another one")
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)

    async def weights_info(self, request: Request) -> Response:
        path = checkpoints.parse((await body_of(WeightsInfo, request)).tinker_path)
        row = self.server.book.checkpoint(tenant_of(request), *path, published=True)
        config = self.server.checkpoints.config(row)
        info = {
            "base_model": self.server.name,
            "is_lora": True,
            "lora_rank": config.rank,
            "optimizer_config": {"type": "adamw"},
        }
        return JSONResponse(info | self.server.trained_families(config))

    async def copy_weights(self, request: Request) -> Response:
        """Copies a checkpoint into a given session or, as the SDK asks, into a new one.

        The new session belongs to a project, which is only a label here.
        """
        body, tenant = await body_of(CopyWeights, request), tenant_of(request)
        source, ttl_s = body.source_path, checkpoints.check_ttl(body.ttl_seconds)
        if body.session_id is None:
            if (project := body.destination_project_id) is None:
                raise wrong("destination_project_id", None, "a project, or a session_id")
            self.server.book.checkpoint(tenant, *checkpoints.parse(source), published=True)
            key = request.headers.get("x-idempotency-key")
            again = (
                None if key is None else blake3_of(json.dumps([tenant, source, key]).encode())[:32]
            )
            session = await asyncio.to_thread(
                self.server.book.open_session, tenant, {"project_id": project}, again
            )
            place = 0
        else:
            if body.model_seq_id is None:
                raise wrong("model_seq_id", None, "the number of a model of the session")
            session, place = body.session_id, body.model_seq_id
        path = await asyncio.to_thread(self.server.copy, tenant, source, session, place, ttl_s)
        return JSONResponse({"tinker_path": path})


def _shown(row: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": checkpoints.KINDS[row.kind],
        "time": iso(row.created),
        "tinker_path": row.path,
        "size_bytes": row.nbytes,
        "public": row.public,
        "user_metadata": row.details.get("metadata"),
        "expires_at": None if row.expires is None else iso(row.expires),
    }


def _listed(name: str, found: list[Any], offset: int, limit: int, count: int) -> Response:
    """Returns one page of a list."""
    cursor = {"offset": offset, "limit": limit, "total_count": count}
    return JSONResponse({name: found, "cursor": cursor})


def _page(query: PageQuery) -> tuple[int, int]:
    """Returns limit and offset."""
    return min(query.limit, MAX_LISTED), query.offset


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


def _status(session: Session) -> dict[str, Any] | None:
    """Returns a session's status; None if it ended without a request of its client."""
    if session.ended is None:
        return {"type": "active"}
    reason, detail = session.details.get("finished"), session.details.get("detail")
    finished = {"type": "client_finished", "reason": {"type": reason}, "detail": detail}
    return None if reason is None else finished


def _fits(query: SearchSessions, session: Session) -> bool:
    """Returns whether a session matches a search: all filters, and one of id and name."""
    notes = session.details
    metadata = notes.get("user_metadata") or {}
    if query.project_ids is not None and notes.get("project_id") not in query.project_ids:
        return False
    if any(metadata.get(key) != value for key, value in (query.user_metadata or {}).items()):
        return False
    status = _status(session)
    if query.statuses is not None and not any(_has(one, status) for one in query.statuses):
        return False
    if query.session_id is None and query.display_name is None:
        return True
    name, words = (notes.get("display_name") or "").lower(), query.display_name
    named = words is not None and all(word in name for word in words.lower().split())
    return named or session.id == query.session_id


def _has(wanted: Status, found: Mapping[str, Any] | None) -> bool:
    """Returns whether a session has a status; none has failed or was cancelled here."""
    if found is None or found["type"] != wanted.type:
        return False
    reasons = REASONS if wanted.reasons is None else wanted.reasons
    return wanted.type != "client_finished" or found["reason"]["type"] in reasons
