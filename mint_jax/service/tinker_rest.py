"""Tinker's REST endpoints: lists of runs, sessions and checkpoints, and checkpoints published,
copied, deleted and downloaded.
"""

import asyncio
import io
import json
import tarfile
from email.utils import formatdate
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from mint_jax import params as params_lib
from mint_jax.catalog.packed import unpack
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service import checkpoints, external
from mint_jax.service.book import Checkpoint, Model, NotFound, iso
from mint_jax.service.handlers import body_of, tenant_of
from mint_jax.service.queries import MAX_LISTED, PageQuery, RunsQuery, query_of
from mint_jax.service.server import Server
from mint_jax.service.tinker_sessions import TRACE, trace_of
from mint_jax.service.tinker_types import CopyWeights, SetTtl, WeightsInfo
from mint_jax.service.validation import wrong
from mint_jax.train.host_state import HostState

# a link's file name; the archive is made when the link is followed
ARCHIVE = "archive.tar"


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
            found = external.names(links.folder, row.digest)
        except FileNotFoundError:  # removed since its row was read
            raise NotFound(f"there is no checkpoint {row.path}") from None
        made = {
            name: str(request.url_for("file", token=links.make(row.digest, name))) for name in found
        }
        return JSONResponse(
            {"urls": made, "expires": iso(self.server.book.clock() + external.LINK_S)}
        )

    async def archive(self, request: Request) -> Response:
        """Redirects old SDKs to a tar of the adapter in PEFT's format, for an hour."""
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
        state = HostState(schema.config, {"factors": dict(params_lib.leaves_with_path(adapter))})
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, data in external.files_of(state, self.server.base, self.server.specs).items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return out.getvalue()

    async def file(self, request: Request) -> Response:
        path = self.server.links.follow(request.path_params["token"])
        if path.name == TRACE:
            tenant, session = path.parent.parent.name, path.parent.name
            trace = await asyncio.to_thread(trace_of, self.server, tenant, session)
            return Response(trace, media_type="application/json")
        if path.name == ARCHIVE:
            archive = await asyncio.to_thread(self._tar, path.parent.name)
            return Response(archive, media_type="application/x-tar")
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
