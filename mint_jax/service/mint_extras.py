"""Requests of MinT's own client, ``mindlab-toolkit``, beyond Tinker's API: sums of sampler weights,
and the reverse KL to a reference, which is refused.
"""

import asyncio
import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax import params as params_lib
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service import checkpoints
from mint_jax.service.answers import group_of
from mint_jax.service.book import Checkpoint, NotFound
from mint_jax.service.handlers import body_of, tenant_of
from mint_jax.service.interpolation import interpolate
from mint_jax.service.server import Server
from mint_jax.service.tinker_types import Interpolate, ReverseKl
from mint_jax.service.training_calls import Refused

MAX_SOURCES = 16
# its loss sums ``p(v) (log p(v) - log q(v))`` over the vocabulary, which no training step computes
NO_REVERSE_KL = (
    "forward_backward_reverse_kl needs the whole distribution of policy and reference at every"
    " token, which this server does not compute; for tokens that the policy sampled send"
    " forward_backward with importance_sampling: advantages are the reference's log-probabilities"
    " (compute_logprobs of a sampling client of it) minus the policy's"
)


class MintExtras:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server = server
        self._running: set[asyncio.Task[None]] = set()  # the event loop keeps weak references only

    async def interpolate(self, request: Request) -> Response:
        """Answers with a future; repeated, it makes the same checkpoint of the same name."""
        body, tenant = await body_of(Interpolate, request), tenant_of(request)
        paths, coefficients = body.source_paths, body.coefficients
        if not 1 <= len(paths) == len(coefficients) <= MAX_SOURCES:
            raise UserError(
                f"there are {len(paths)} source_paths and {len(coefficients)} coefficients;"
                f" expected 1 to {MAX_SOURCES} pairs"
            )
        digest = blake3_of(await request.body())
        name = f"interpolated-{digest[:12]}"
        if body.output_path is not None:
            name = checkpoints.check_name(body.output_path)
        rows = [self._source(tenant, path, published=i > 0) for i, path in enumerate(paths)]
        answer, _ = self.server.answers.begin(group_of(tenant, rows[0].model), None, digest)

        async def end() -> None:
            try:
                value = await asyncio.to_thread(self._sum, digest, rows, coefficients, name)
                self.server.answers.end(answer, value)
            except Exception as failure:
                self.server.answers.end(answer, failure=failure)

        task = asyncio.create_task(end())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return _future(answer.id, rows[0].model)

    def _source(self, tenant: str, path: str, published: bool) -> Checkpoint:
        """Returns the row of sampler weights. The sum goes to the model of the first, which must be
        the caller's own.
        """
        where = checkpoints.parse(path)
        if where.kind != "sampler_weights":
            raise UserError(
                f"{path} is no path of sampler weights; save_weights_for_sampler makes them"
            )
        row = self.server.book.checkpoint(tenant, *where, published=published)
        if row.details["base"] != self.server.base.fingerprint:
            raise UserError(
                f"{path} is of another base, {row.details['base'][:12]}: sum what is of"
                f" {self.server.name}"
            )
        return row

    def _sum(
        self, request: str, rows: list[Checkpoint], coefficients: list[float], name: str
    ) -> dict[str, Any]:
        """Makes the checkpoint and returns the result. Its revision gets a policy of its own: all
        revisions of a policy have one rank, and sums may have another.
        """
        server, first = self.server, rows[0]
        unpacked = [unpack(server.catalog.load(row.digest)) for row in rows]
        sources = [(adapter, schema.config) for adapter, schema in unpacked]
        # the smallest rank of a slot in which the sum is exact, else the largest rank
        ranks, whole = sorted(server.sizes.adapters), sum(config.rank for _, config in sources)
        rank = next((rank for rank in ranks if rank >= whole), ranks[-1])
        made = interpolate(sources, coefficients, server.specs, rank)

        base = server.base.fingerprint
        schema = Schema(base, made.config)
        policy = f"{first.tenant}/{first.model}:sums:{blake3_of(schema.to_json().encode())[:16]}"
        data = pack(params_lib.nest(made.factors), schema)
        digest, config = digest_of(data), dataclasses.asdict(made.config)
        notes = {"source_paths": [row.path for row in rows], "coefficients": coefficients}
        details = {"config": config, "base": base, "metadata": notes, "policy": policy}
        about = (first.model, "sampler_weights", name, first.tenant, digest, len(data), request)
        row = Checkpoint(*about, details, server.book.clock(), None, False)
        with server.checkpoints.naming, server.checkpoints.using(digest, policy):
            server.book.need_free(row.model, row.kind, row.name, request)
            server.checkpoints.need_room(first.tenant, len(data))
            origin = "sum of sampler weights"
            server.catalog.export(policy, data, 0, create=True, by="service", origin=origin)
            server.book.add_checkpoint(row)
        return {
            "type": "mint_interpolate_checkpoints",
            "path": row.path,
            "checkpoint_type": "sampler",
            "has_rank_shards": False,
            "rank": made.config.rank,
            "relative_error": made.error,
            **notes,
        }

    async def reverse_kl(self, request: Request) -> Response:
        """Fails its future; a numbered request uses up its number."""
        body, tenant = await body_of(ReverseKl, request), tenant_of(request)
        model = self.server.book.model(tenant, body.model_id)
        if model.ended is not None:
            raise NotFound(f"model {model.id!r} has ended: load a checkpoint of it into a new one")
        if body.seq_id is not None:
            refused = Refused(NO_REVERSE_KL)
            id = await self.server.durable.submit_task(model.id, body.seq_id + 1, refused)
            return _future(id, model.id)
        answer, _ = self.server.answers.begin(group_of(tenant, model.id), None, "")
        self.server.answers.end(answer, failure=UserError(NO_REVERSE_KL))
        return _future(answer.id, model.id)


def _future(id: str, model: str) -> Response:
    return JSONResponse({"request_id": id, "model_id": model})
