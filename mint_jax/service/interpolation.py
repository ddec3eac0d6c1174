"""Sums of sampler weights, which MinT's own client ``mindlab-toolkit`` requests.

A sum of low-rank deltas is a low-rank delta of all factors, stacked: with deltas ``s_i A_i^T B_i``
(rank first, ``s_i`` the adapter's scale) and coefficients ``c_i``,

    sum_i c_i s_i A_i^T B_i = [A_1; A_2; ..]^T [c_1 s_1 B_1; c_2 s_2 B_2; ..]

has rank ``R = r_1 + r_2 + ..``, exactly. Averages of A and of B would be another adapter.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax import params as params_lib
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import SHARED_OUTER, AdapterConfig
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
            server.answers.end(answer, _make(server, digest, rows, coefficients, name))
        except Exception as failure:
            server.answers.end(answer, failure=failure)

    future = {"request_id": answer.id, "model_id": rows[0].model}
    return JSONResponse(future, background=BackgroundTask(end))


def _make(
    server: Server, request: str, rows: list[Checkpoint], coefficients: list[float], name: str
) -> dict[str, Any]:
    """Makes the checkpoint of a sum and returns the client's result."""
    unpacked = [unpack(server.catalog.load(row.digest)) for row in rows]
    sources = [(adapter, schema.config) for adapter, schema in unpacked]
    # the smallest rank of a slot in which the sum is exact, else the largest rank
    ranks, whole = sorted(server.sizes.adapters), sum(config.rank for _, config in sources)
    rank = next((rank for rank in ranks if rank >= whole), ranks[-1])
    adapter, config, error = weighted_sum(sources, coefficients, server.specs, rank)

    first, schema = rows[0], Schema(server.base.fingerprint, config)
    # a policy of its own: all revisions of a policy have one rank, and sums may have another
    policy = f"{first.tenant}/{first.model}:sums:{blake3_of(schema.to_json().encode())[:16]}"
    data = pack(adapter, schema)
    notes = {"source_paths": [row.path for row in rows], "coefficients": coefficients}
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
        origin = "sum of sampler weights"
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


def weighted_sum(
    sources: Sequence[tuple[Any, AdapterConfig]],
    coefficients: Sequence[float],
    specs: Any,
    rank: int,
) -> tuple[Any, AdapterConfig, float]:
    """Returns an adapter of scale 1, float32, of the sources' deltas times their coefficients, its
    config, and the Frobenius norm of what ``rank`` omits over that of the sum: 0 if exact. Raises
    ``UserError``: the sum exceeds float32, or experts would no longer share a factor.
    """
    flat = [dict(params_lib.leaves_with_path(tree)) for tree, _ in sources]
    scales = [c * config.scale for c, (_, config) in zip(coefficients, sources, strict=True)]
    fits = sum(config.rank for _, config in sources) <= rank
    factors, total, omitted = {}, 0.0, 0.0
    paths = sorted({leaf.rsplit("/", 1)[0] for leaves in flat for leaf in leaves})
    is_shared = any(f"/{SHARED_OUTER}/" in path for path in paths)
    each = any("/experts/" in path and SHARED_OUTER not in path for path in paths)
    if is_shared and (each or not fits):
        raise UserError(
            f"a source's experts share factors (experts {SHARED_OUTER!r}), which the sum keeps only"
            f" if all do and its rank, {rank}, is at least the sum of theirs,"
            f" {sum(config.rank for _, config in sources)}"
        )
    for path in paths:
        present = [
            (leaves[f"{path}/a"], leaves[f"{path}/b"], scale)
            for leaves, scale in zip(flat, scales)
            if f"{path}/a" in leaves
        ]
        layers = []
        for layer in range(len(present[0][0])):  # one by one: float64 takes memory
            # float64 before the scale, which may exceed float32
            a = np.concatenate([np.float64(a[layer]) for a, _, _ in present], axis=-2)
            b = np.concatenate([c * np.float64(b[layer]) for _, b, c in present], axis=-2)
            if not fits:
                a, b, values = _nearest(a, b, rank)
                total += (values**2).sum()
                omitted += (values[..., rank:] ** 2).sum()
            layers.append((_padded(a, rank, path), _padded(b, rank, path)))
        factors[f"{path}/a"], factors[f"{path}/b"] = map(np.stack, zip(*layers))
    targets = tuple(dict.fromkeys(target for _, config in sources for target in config.targets))
    form = SHARED_OUTER if is_shared else "each"
    made = AdapterConfig(rank, float(rank), targets, experts=form)
    config = lora_tree.spelled_out(made, specs)
    error = float(np.sqrt(omitted / total)) if total else 0.0
    return params_lib.nest(factors), config, error


def _nearest(a: np.ndarray, b: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns factors of the nearest ``a^T b`` of at most ``rank`` (Eckart and Young 1936), each
    with the root of the singular values, and all of these, ``[.., R]``.
    """
    # a^T = q_a r_a, so that the SVD is of a matrix of at most R rows
    (q_a, r_a), (q_b, r_b) = (np.linalg.qr(np.swapaxes(factor, -1, -2)) for factor in (a, b))
    u, values, v = np.linalg.svd(r_a @ np.swapaxes(r_b, -1, -2), full_matrices=False)
    roots = np.sqrt(values[..., :rank, None])
    new_a = roots * np.swapaxes(q_a @ u[..., :rank], -1, -2)
    new_b = roots * (v[..., :rank, :] @ np.swapaxes(q_b, -1, -2))
    return new_a, new_b, values


def _padded(factor: np.ndarray, rank: int, path: str) -> np.ndarray:
    """Returns a factor in float32 with rows of zeros up to a rank."""
    rows = [(0, 0)] * factor.ndim
    rows[-2] = (0, rank - factor.shape[-2])
    with np.errstate(over="ignore"):
        out = np.pad(factor, rows).astype(np.float32)
    if not np.isfinite(out).all():
        raise UserError(
            f"the sum has numbers beyond float32 at {path}: choose coefficients nearer to 1"
        )
    return out
