"""Merges of sampler weights, see ``lora.merge``. MinT's own client requests sums."""

import dataclasses
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.merge import MergeConfig, merge
from mint_jax.service import checkpoints
from mint_jax.service.answers import group_of
from mint_jax.service.book import Checkpoint
from mint_jax.service.server import Server
from mint_jax.service.tinker_types import Interpolate
from mint_jax.service.validation import body_of, tenant_of

MAX_SOURCES = 16


async def interpolate(server: Server, request: Request) -> Response:
    """Answers with a future; repeated, it makes the same checkpoint of the same name."""
    body, tenant = await body_of(Interpolate, request), tenant_of(request)
    paths, coefficients = body.source_paths, body.coefficients
    if not 1 <= len(paths) == len(coefficients) <= MAX_SOURCES:
        raise UserError(
            f"there are {len(paths)} source_paths and {len(coefficients)} coefficients;"
            f" expected 1 to {MAX_SOURCES} pairs"
        )
    how = MergeConfig(body.method, body.density, body.rank, body.seed)
    if body.rank > (most := max(server.sizes.adapters)):
        raise UserError(f"rank is {body.rank}; this server's adapters have at most {most}")
    digest = blake3_of(await request.body())
    name = f"interpolated-{digest[:12]}"
    if body.output_path is not None:
        name = checkpoints.check_name(body.output_path)
    # the sum goes to the model of the first source, which must be the tenant's own
    find = server.checkpoints.sampled
    rows = [find(tenant, path, published=i > 0) for i, path in enumerate(paths)]
    for row in rows:
        server.checkpoints.need_base(row)
    answer, _ = server.answers.begin(group_of(tenant, rows[0].model), None, digest)

    def end() -> None:
        try:
            server.answers.end(answer, _make(server, digest, rows, coefficients, how, name))
        except Exception as failure:
            server.answers.end(answer, failure=failure)

    future = {"request_id": answer.id, "model_id": rows[0].model}
    return JSONResponse(future, background=BackgroundTask(end))


def _make(
    server: Server,
    request: str,
    rows: list[Checkpoint],
    coefficients: list[float],
    how: MergeConfig,
    name: str,
) -> dict[str, Any]:
    """Makes the checkpoint of a merge and returns the client's result."""
    unpacked = [unpack(server.catalog.load(row.digest)) for row in rows]
    sources = [(adapter, schema.config) for adapter, schema in unpacked]
    # unless asked for, the smallest rank of a slot in which a sum is exact, else the largest rank
    ranks, whole = sorted(server.sizes.adapters), sum(config.rank for _, config in sources)
    if whole and not how.rank:
        rank = next((rank for rank in ranks if rank >= whole), ranks[-1])
        how = dataclasses.replace(how, rank=rank)
    adapter, config, error = merge(sources, coefficients, how)
    config = lora_tree.spelled_out(config, server.specs)

    first, schema = rows[0], Schema(server.base.fingerprint, config)
    # a policy of its own: all revisions of a policy have one rank, and sums may have another
    policy = f"{first.tenant}/{first.model}:sums:{blake3_of(schema.to_json().encode())[:16]}"
    data = pack(adapter, schema)
    notes = {"source_paths": [row.path for row in rows], "coefficients": coefficients}
    if how.method != "sum":
        notes |= {"method": how.method, "density": how.density, "seed": how.seed}
    details = {"config": dataclasses.asdict(config), "policy": policy, "metadata": notes}
    row = dataclasses.replace(
        first,
        name=name,
        digest=digest_of(data),
        nbytes=len(data),
        request=request,
        details=first.details | details,
        created=server.book.clock(),
        expires=None,
        public=False,
    )

    def write() -> None:
        origin = "merge of sampler weights"
        server.catalog.export(policy, data, 0, create=True, by="service", origin=origin)

    server.checkpoints.add(row, write, len(data))
    return {
        "type": "mint_interpolate_checkpoints",
        "path": row.path,
        "checkpoint_type": "sampler",
        "has_rank_shards": False,
        "rank": config.rank,
        "relative_error": error,
        **notes,
    }
