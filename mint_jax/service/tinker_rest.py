"""Tinker's REST part: what was trained and saved, by pages; names, times to live, copies and
downloads of checkpoints.
"""

import asyncio
import io
import json
import tarfile
from email.utils import formatdate
from typing import Any

from starlette.requests import Request as Asked
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from mint_jax import params as params_lib
from mint_jax.catalog.packed import unpack
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service import checkpoints, external
from mint_jax.service.asking import Handler, tenant_of, told_in
from mint_jax.service.book import Checkpoint, Model, NotFound, iso
from mint_jax.service.server import Server
from mint_jax.service.tinker_sessions import TRACE, trace_of
from mint_jax.service.wire.reading import integer, text
from mint_jax.train.host_state import HostState

PAGE = 20
LONGEST_PAGE = 1000
# of a link: no file of this name lies anywhere, it is made for who follows it
ARCHIVE = "archive.tar"
_CHECKPOINT = "training_runs/{model}/checkpoints/{kind}/{name}"


class Rest:
    """The handlers over one server."""

    def __init__(self, server: Server):
        self.server = server

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            ("GET", "training_runs", self.runs),
            ("GET", "training_runs/{model}", self.run),
            ("GET", "training_runs/{model}/checkpoints", self.checkpoints_of),
            ("GET", "checkpoints", self.checkpoints),
            ("DELETE", _CHECKPOINT, self.delete),
            ("POST", f"{_CHECKPOINT}/publish", self.publish),
            ("DELETE", f"{_CHECKPOINT}/publish", self.unpublish),
            ("PUT", f"{_CHECKPOINT}/ttl", self.set_ttl),
            ("GET", f"{_CHECKPOINT}/external_weights_urls", self.urls),
            ("GET", f"{_CHECKPOINT}/archive", self.archive),
            ("GET", "files/{token}", self.file),
            ("POST", "weights_info", self.weights_info),
            ("POST", "copy_weights", self.copy),
            ("GET", "sessions", self.sessions),
            ("GET", "sessions/{session}", self.session),
        ]
        return [
            Route(f"/api/v1/{path}", handler, methods=[method]) for method, path, handler in table
        ]

    # -- runs and sessions

    async def runs(self, request: Asked) -> Response:
        limit, offset = _page(request)
        book, tenant = self.server.book, tenant_of(request)
        project = request.query_params.get("project_id")
        found = [self._run(model, tenant) for model in book.models(tenant, limit, offset, project)]
        cursor = {
            "offset": offset,
            "limit": limit,
            "total_count": book.count_models(tenant, project),
        }
        return JSONResponse({"training_runs": found, "cursor": cursor})

    async def run(self, request: Asked) -> Response:
        tenant = tenant_of(request)
        return JSONResponse(
            self._run(self.server.book.model(tenant, request.path_params["model"]), tenant)
        )

    def _run(self, model: Model, tenant: str) -> dict[str, Any]:
        saved = self.server.book.checkpoints(tenant, model.id)
        newest = {
            kind: next((_shown(row) for row in saved if row.kind == kind), None)
            for kind in checkpoints.KINDS
        }
        heard = max([model.created, *(row.created for row in saved)])
        return {
            "training_run_id": model.id,
            "base_model": self.server.name,
            "model_owner": tenant,
            "is_lora": True,
            "lora_rank": model.details.get("rank"),
            "corrupted": False,
            "last_request_time": iso(heard),
            "last_checkpoint": newest["weights"],
            "last_sampler_checkpoint": newest["sampler_weights"],
            "user_metadata": model.details.get("metadata"),
        }

    async def sessions(self, request: Asked) -> Response:
        found = self.server.book.sessions(tenant_of(request), *_page(request))
        return JSONResponse({"sessions": [session.id for session in found]})

    async def session(self, request: Asked) -> Response:
        book, tenant = self.server.book, tenant_of(request)
        found = book.session(tenant, request.path_params["session"])
        told = {
            "user_metadata": found.details.get("user_metadata"),
            "display_name": found.details.get("display_name"),
        }
        runs, samplers = book.models_of(tenant, found.id), book.samplers_of(tenant, found.id)
        return JSONResponse({"training_run_ids": runs, "sampler_ids": samplers} | told)

    # -- checkpoints

    async def checkpoints(self, request: Asked) -> Response:
        limit, offset = _page(request)
        book, tenant = self.server.book, tenant_of(request)
        found = [_shown(row) for row in book.checkpoints(tenant, limit=limit, offset=offset)]
        cursor = {"offset": offset, "limit": limit, "total_count": book.count_checkpoints(tenant)}
        return JSONResponse({"checkpoints": found, "cursor": cursor})

    async def checkpoints_of(self, request: Asked) -> Response:
        book, tenant = self.server.book, tenant_of(request)
        model = book.model(tenant, request.path_params["model"])
        return JSONResponse(
            {"checkpoints": [_shown(row) for row in book.checkpoints(tenant, model.id)]}
        )

    def _row(self, request: Asked) -> Checkpoint:
        asked = request.path_params
        return self.server.book.checkpoint(
            tenant_of(request), asked["model"], asked["kind"], asked["name"]
        )

    async def delete(self, request: Asked) -> Response:
        await asyncio.to_thread(self.server.checkpoints.remove, self._row(request))
        return Response(status_code=204)

    async def publish(self, request: Asked) -> Response:
        self.server.book.change_checkpoint(self._row(request), public=True)
        return JSONResponse({})

    async def unpublish(self, request: Asked) -> Response:
        self.server.book.change_checkpoint(self._row(request), public=False)
        return JSONResponse({})

    async def set_ttl(self, request: Asked) -> Response:
        row, told = self._row(request), await told_in(request)
        seconds = checkpoints.check_ttl(told.get("ttl_seconds"))
        book = self.server.book
        book.change_checkpoint(row, expires=None if seconds is None else book.clock() + seconds)
        return JSONResponse({})

    async def urls(self, request: Asked) -> Response:
        row, links = self._row(request), self.server.links
        if row.kind != "external_weights":
            raise UserError(
                f"{row.path} has no files to download; save_weights_external makes some"
            )
        try:
            found = external.names(links.folder, row.digest)
        except FileNotFoundError:  # removed since its row was read
            raise NotFound(f"there is no checkpoint {row.path}") from None
        made = {
            name: str(request.url_for("file", token=links.make(row.digest, name))) for name in found
        }
        return JSONResponse(
            {"urls": made, "expires": iso(self.server.book.clock() + external.LINK_S)}
        )

    async def archive(self, request: Asked) -> Response:
        """Old SDKs: where a tar of the adapter is for the next hour, as PEFT has it."""
        row, links = self._row(request), self.server.links
        if row.kind != "sampler_weights":
            raise UserError(
                f"{row.path} has no archive; sampler weights have one, which"
                " save_weights_for_sampler makes"
            )
        where = request.url_for("file", token=links.make(row.digest, ARCHIVE))
        until = formatdate(self.server.book.clock() + external.LINK_S, usegmt=True)
        return Response(status_code=302, headers={"location": str(where), "expires": until})

    def _tar(self, digest: str) -> bytes:
        adapter, schema = unpack(self.server.checkpoints.fetch(digest))
        held = HostState(schema.config, {"factors": dict(params_lib.leaves_with_path(adapter))})
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, data in external.files_of(held, self.server.base, self.server.specs).items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return out.getvalue()

    async def file(self, request: Asked) -> Response:
        path = self.server.links.follow(request.path_params["token"])
        if path.name == TRACE:
            made = await asyncio.to_thread(
                trace_of, self.server, path.parent.parent.name, path.parent.name
            )
            return Response(made, media_type="application/json")
        if path.name == ARCHIVE:
            return Response(
                await asyncio.to_thread(self._tar, path.parent.name), media_type="application/x-tar"
            )
        if not path.is_file():
            raise NotFound("the checkpoint of this link was deleted: save another one")
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)

    async def weights_info(self, request: Asked) -> Response:
        path = checkpoints.parse(text((await told_in(request)).get("tinker_path"), "tinker_path"))
        row = self.server.book.checkpoint(tenant_of(request), *path, published=True)
        config = self.server.checkpoints.config(row)
        told = {
            "base_model": self.server.name,
            "is_lora": True,
            "lora_rank": config.rank,
            "optimizer_config": {"type": "adamw"},
        }
        return JSONResponse(told | self.server.trained_families(config))

    async def copy(self, request: Asked) -> Response:
        """Into a session that is named; or, as the SDK asks for it, into a new one of a project,
        which is a label here.
        """
        told, tenant = await told_in(request), tenant_of(request)
        source, ttl_s = (
            text(told.get("source_path"), "source_path"),
            checkpoints.check_ttl(told.get("ttl_seconds")),
        )
        if told.get("session_id") is None:
            project = text(told.get("destination_project_id"), "destination_project_id")
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
            session = text(told["session_id"], "session_id")
            place = integer(told.get("model_seq_id"), "model_seq_id", 0)
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


def _page(request: Asked) -> tuple[int, int]:
    """How many, from which on."""

    def of(name: str, default: int, most: int) -> int:
        told = request.query_params.get(name)
        if told is None:
            return default
        if not told.isdecimal() or len(told) > 18:
            raise UserError(f"{name} is {told[:40]!r}; expected a number from 0")
        return min(int(told), most)

    return of("limit", PAGE, LONGEST_PAGE), of("offset", 0, 2**62)
