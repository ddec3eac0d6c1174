"""Tinker's REST endpoints: lists of runs, sessions and checkpoints; sessions searched, moved into
projects and exported as a trace; checkpoints published, copied, deleted and downloaded.

A project is only a label here: a tenant has access to all projects.
"""

import asyncio
import datetime
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service import checkpoints, tokens
from mint_jax.service import tinker_types as types
from mint_jax.service.book import Checkpoint, Model, NotFound, Session, iso
from mint_jax.service.costs import HOUR_S
from mint_jax.service.server import Server
from mint_jax.service.validation import (
    PageQuery,
    RunsQuery,
    UsageQuery,
    body_of,
    query_of,
    tenant_of,
    wrong,
)

USAGE = "sampling_prefill", "sampling_sample", "training"  # in the order of ``costs.COUNTED``
MAX_USAGE_H = 14 * 24
TRACE = "trace.json"  # a link's file name; the trace is made when the link is followed


class Rest:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server, self.book = server, server.book

    def _session(self, request: Request) -> Session:
        return self.book.session(tenant_of(request), request.path_params["session"])

    def _model(self, request: Request) -> Model:
        return self.book.model(tenant_of(request), request.path_params["model"])

    def _row(self, request: Request) -> Checkpoint:
        names = (request.path_params[name] for name in ("model", "kind", "name"))
        return self.book.checkpoint(tenant_of(request), *names)

    # -- runs and sessions

    async def training_runs(self, request: Request) -> Response:
        query, tenant = query_of(RunsQuery, request), tenant_of(request)
        models = self.book.models(tenant, query.limit, query.offset, query.project_id)
        count = self.book.count_models(tenant, query.project_id)
        return _listed("training_runs", map(self._run, models), query, count)

    async def training_run(self, request: Request) -> Response:
        return JSONResponse(self._run(self._model(request)))

    def _run(self, model: Model) -> dict[str, Any]:
        saved = self.book.checkpoints(model.tenant, model.id)
        newest = {row.kind: _shown(row) for row in reversed(saved)}
        return {
            "training_run_id": model.id,
            "base_model": self.server.name,
            "model_owner": model.tenant,
            "is_lora": True,
            "lora_rank": model.details.get("rank"),
            "corrupted": False,
            "last_request_time": iso(max([model.created, *(row.created for row in saved)])),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": model.details.get("metadata"),
        }

    async def sessions(self, request: Request) -> Response:
        query = query_of(PageQuery, request)
        found = self.book.sessions(tenant_of(request), query.limit, query.offset)
        return JSONResponse({"sessions": [session.id for session in found]})

    async def session(self, request: Request) -> Response:
        tenant, found = tenant_of(request), self._session(request)
        answer = {name: found.details.get(name) for name in ("user_metadata", "display_name")}
        answer["training_run_ids"] = self.book.models_of(tenant, found.id)
        answer["sampler_ids"] = self.book.samplers_of(tenant, found.id)
        return JSONResponse(answer)

    async def search(self, request: Request) -> Response:
        """Answers with a page of the tenant's sessions that match, newest first."""
        query, tenant = await body_of(types.SearchSessions, request), tenant_of(request)
        limit, owner = query.limit or 50, query.owner
        owners = [tenant] if owner is None or owner.type != "user" else owner.owner_urns
        if owners is None:
            raise wrong("owner.owner_urns", None, "a list of owners")
        sessions = self.book.sessions(tenant) if tenant in owners else []
        found = [one for one in sorted(sessions, key=_place, reverse=True) if _fits(query, one)]
        if (after := query.cursor) is not None:
            end = after.last_created_at, after.last_session_id
            found = [one for one in found if _place(one) < end]
        page, cursor = [self._summary(one) for one in found[:limit]], None
        if len(found) > limit:
            last = page[-1]
            cursor = {"last_created_at": last["created_at"], "last_session_id": last["session_id"]}
        return JSONResponse({"sessions": page, "next_cursor": cursor})

    def _summary(self, session: Session) -> dict[str, Any]:
        count, nbytes = self.book.checkpoint_totals(session.tenant, session.id)
        return {
            "session_id": session.id,
            "created_at": _place(session)[0].isoformat(),
            "owner": session.tenant,
            "project_id": session.details.get("project_id") or "",
            "status": _status(session),
            "checkpoints_count": count,
            "checkpoint_storage_bytes": nbytes,
            "display_name": session.details.get("display_name"),
            "user_metadata": session.details.get("user_metadata"),
        }

    async def usage(self, request: Request) -> Response:
        """Answers with tokens by hour and policy; a session is known of training only."""
        query, tenant = query_of(UsageQuery, request), tenant_of(request)
        first, last = (t.timestamp() / HOUR_S for t in (query.starting_on, query.ending_before))
        hours = last - first
        if first % 1 or last % 1 or not 0 < hours <= MAX_USAGE_H:
            raise UserError(
                f"usage is from {query.starting_on} until {query.ending_before}; expected whole"
                f" hours, at most {MAX_USAGE_H} of them"
            )
        found = await asyncio.to_thread(self.server.costs.hourly, tenant, int(first), int(last))
        events, sessions = [], {}
        for hour, policy, counts in found:
            row = {"bucket_start": iso(hour * HOUR_S), "bucket_end": iso((hour + 1) * HOUR_S)}
            row["base_model"] = self.server.name
            for kind, count in zip(USAGE, counts, strict=True):
                if not count:
                    continue
                info: dict[str, Any] = {"type": kind, "token_count": count}
                own = {}
                if kind == "training":
                    session = self.book.session(tenant, policy.rpartition(":train:")[0])
                    notes = session.details
                    own = {"session_id": session.id, "project_id": notes.get("project_id")}
                    sessions[session.id] = {"user_metadata": notes.get("user_metadata")}
                elif kind == "sampling_prefill":
                    info["cached"] = False
                events.append(row | own | {"event_info": info})
        return JSONResponse({"data": events, "sessions": sessions})

    async def stored(self, request: Request) -> Response:
        """Answers with the checkpoints of each project."""
        names = "project_id", "checkpoint_count", "size_bytes", "size_gigabytes"
        project = query_of(RunsQuery, request).project_id
        found = await asyncio.to_thread(self.book.stored, tenant_of(request), project)
        rows = [dict(zip(names, (*row, row[-1] / 1e9), strict=True)) for row in found]
        return JSONResponse({"data": rows})

    async def project(self, request: Request) -> Response:
        """Moves a session, and with it its runs, into a project."""
        session, body = self._session(request), await body_of(types.AssignProject, request)
        self.book.update_session(session, project_id=body.project_id)
        return JSONResponse({})

    async def trace_export(self, request: Request) -> Response:
        """Answers with a link to the session's timeline, valid without a key for an hour."""
        session = self._session(request)
        url = self._url(request, f"{session.tenant}/{session.id}", TRACE)
        return JSONResponse({"status": "ready", "url": url})

    def _url(self, request: Request, folder: str, name: str) -> str:
        return str(request.url_for("file", token=self.server.links.make(f"{folder}/{name}")))

    # -- checkpoints

    async def checkpoints(self, request: Request) -> Response:
        query, tenant = query_of(PageQuery, request), tenant_of(request)
        found = self.book.checkpoints(tenant, limit=query.limit, offset=query.offset)
        count = self.book.checkpoint_totals(tenant)[0]
        return _listed("checkpoints", map(_shown, found), query, count)

    async def checkpoints_of(self, request: Request) -> Response:
        model = self._model(request)
        found = map(_shown, self.book.checkpoints(model.tenant, model.id))
        return JSONResponse({"checkpoints": list(found)})

    async def delete(self, request: Request) -> Response:
        await asyncio.to_thread(self.server.checkpoints.remove, self._row(request))
        return Response(status_code=204)

    async def _change(self, request: Request, **values: Any) -> Response:
        self.book.change_checkpoint(self._row(request), **values)
        return JSONResponse({})

    publish = functools.partialmethod(_change, public=True)
    unpublish = functools.partialmethod(_change, public=False)

    async def ttl(self, request: Request) -> Response:
        seconds = (await body_of(types.SetTtl, request)).ttl_seconds
        expires = None if seconds is None else self.book.clock() + seconds
        return await self._change(request, expires=expires)

    async def external_weights_urls(self, request: Request) -> Response:
        row = self._row(request)
        if row.kind != "external_weights":
            raise UserError(f"{row.path} has no files; save_weights_external makes some")
        folder = self.server.checkpoints.external / row.digest
        if not (names := sorted(path.name for path in folder.glob("*"))):
            raise NotFound(f"there is no checkpoint {row.path}")  # removed since its row was read
        urls = {name: self._url(request, row.digest, name) for name in names}
        return JSONResponse({"urls": urls, "expires": iso(self.book.clock() + tokens.LIFE_S)})

    async def file(self, request: Request) -> Response:
        link = self.server.links.key_of(request.path_params["token"])
        if link is None:
            raise UserError("this link has expired, or is not from this server: request a new one")
        path = self.server.checkpoints.external / link
        if path.name == TRACE:
            trace = await asyncio.to_thread(trace_of, self.server, *link.split("/")[:2])
            return Response(trace, media_type="application/json")
        if not path.is_file():
            raise NotFound("the checkpoint of this link was deleted: save another one")
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)

    async def weights_info(self, request: Request) -> Response:
        path = checkpoints.parse((await body_of(types.WeightsInfo, request)).tinker_path)
        row = self.book.checkpoint(tenant_of(request), *path, published=True)
        config = self.server.checkpoints.config(row)
        info = {"base_model": self.server.name, "is_lora": True, "lora_rank": config.rank}
        info |= self.server.trained_families(config)
        return JSONResponse(info | {"optimizer_config": {"type": row.optimizer}})

    async def copy_weights(self, request: Request) -> Response:
        """Copies a checkpoint into a given session or, as the SDK asks, into a new one of a
        project.
        """
        body, tenant = await body_of(types.CopyWeights, request), tenant_of(request)
        source, session, place = body.source_path, body.session_id, body.model_seq_id
        if session is None:
            if (project := body.destination_project_id) is None:
                raise wrong("destination_project_id", None, "a project, or a session_id")
            self.book.checkpoint(tenant, *checkpoints.parse(source), published=True)
            key, again, place = request.headers.get("x-idempotency-key"), None, 0
            if key is not None:
                again = blake3_of(json.dumps([tenant, source, key]).encode())[:32]
            new = tenant, {"project_id": project}, again
            session = await asyncio.to_thread(self.book.open_session, *new)
        if place is None:
            raise wrong("model_seq_id", None, "the number of a model of the session")
        copied = tenant, source, session, place, body.ttl_seconds
        path = await asyncio.to_thread(self.server.copy, *copied)
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


def _listed(name: str, rows: Iterable[dict[str, Any]], query: PageQuery, count: int) -> Response:
    cursor = {"offset": query.offset, "limit": query.limit, "total_count": count}
    return JSONResponse({name: list(rows), "cursor": cursor})


def trace_of(server: Server, tenant: str, id: str) -> bytes:
    """Returns a session's timeline in Chrome's trace format, for https://ui.perfetto.dev.

    There is a row for each model, with its lifetime, its updates with loss and gradient norm, and
    its checkpoints, and one for each sampler. Times of single requests are not kept.
    """
    book, session, events = server.book, server.book.session(tenant, id), []
    # name, begin, end, notes, and moments of each row
    rows: list[Any] = [(f"session {id}", session.created, session.ended, session.details, ())]
    for name in book.models_of(tenant, id):
        model, saves = book.model(tenant, name), book.checkpoints(tenant, name)
        moments = [
            ("update", point.at, {"number": i, "loss": point.loss, "grad_norm": point.grad_norm})
            for i, point in server.curves.of(name, 10_000)
        ]
        moments += [(f"{s.kind}/{s.name}", s.created, {"bytes": s.nbytes}) for s in saves]
        rank = {"rank": model.details.get("rank")}
        rows.append((name, model.created, model.ended, rank, moments))
    for name in book.samplers_of(tenant, id):
        sampler = server.sampler(tenant, name)
        rows.append((name, sampler.created, session.ended, {"path": sampler.path}, ()))
    for i, (name, begin, end, args, moments) in enumerate(rows):
        row, us = {"pid": 1, "tid": i}, round(1e6 * ((end or book.clock()) - begin))
        life = row | {"ph": "X", "name": name, "ts": round(1e6 * begin), "dur": us, "args": args}
        events += [row | {"ph": "M", "name": "thread_name", "args": {"name": name}}, life]
        moment = row | {"ph": "i", "s": "t"}
        for what, at, args in moments:
            events.append(moment | {"name": what, "ts": round(1e6 * at), "args": args})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def _place(session: Session) -> tuple[datetime.datetime, str]:
    """Returns the sort key of a session: creation to the microsecond, as in a cursor, and id."""
    return datetime.datetime.fromtimestamp(session.created, datetime.UTC), session.id


def _status(session: Session) -> dict[str, Any] | None:
    """Returns a session's status; None if it ended without a request of its client."""
    if session.ended is None:
        return {"type": "active"}
    if (reason := session.details.get("finished")) is None:
        return None
    detail = session.details.get("detail")
    return {"type": "client_finished", "reason": {"type": reason}, "detail": detail}


def _fits(query: types.SearchSessions, session: Session) -> bool:
    """Returns whether a session matches a search: all filters, and one of id and name."""
    notes, status, words = session.details, _status(session), query.display_name
    metadata, name = notes.get("user_metadata") or {}, (notes.get("display_name") or "").lower()
    named = words is not None and all(word in name for word in words.lower().split())
    anything = query.session_id is None and words is None
    return (
        (query.project_ids is None or notes.get("project_id") in query.project_ids)
        and all(metadata.get(key) == value for key, value in (query.user_metadata or {}).items())
        and (query.statuses is None or any(_has(one, status) for one in query.statuses))
        and (anything or named or session.id == query.session_id)
    )


def _has(wanted: types.Status, found: Mapping[str, Any] | None) -> bool:
    """Returns whether a session has a status; none has failed or was cancelled here."""
    if found is None or found["type"] != wanted.type:
        return False
    reasons = types.REASONS if wanted.reasons is None else wanted.reasons
    return wanted.type != "client_finished" or found["reason"]["type"] in reasons
