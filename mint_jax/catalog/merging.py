"""Merges of revisions: ordinary revisions that record their members."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.catalog.records import exports, lookup, training_records
from mint_jax.catalog.records.audit import Signed
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.records.handle import Handle
from mint_jax.catalog.records.lookup import Revision
from mint_jax.errors import UserError
from mint_jax.lora.merge import MergeConfig
from mint_jax.lora.merge import merge as merge_adapters


def merge(
    catalog: Handle,
    policy: str,
    members: Sequence[str],
    weights: Sequence[float] | None = None,
    how: MergeConfig = MergeConfig(),
    *,
    tenant: str | None = None,
    **signed: Unpack[Signed],
) -> Revision:
    """Exports a merge as the next revision of a policy, which is created if it is missing. The same
    merge again is the same revision. Its record has the newest evaluation of each member.

    Args:
        members: names of revisions of one base.
        weights: by default 1 / the number of members, and 1 for TIES, which averages by itself.
        tenant: as of ``resolve``.

    Raises:
        UserError: as ``lora.merge.merge`` and ``export``, or members of two bases.
    """
    found = lookup.resolve_many(catalog, members, tenant)
    if weights is None:
        weights = [1.0 if "ties" in how.method else 1 / max(1, len(found))] * len(found)
    unpacked = [unpack(lookup.load_payload(catalog, one.digest)) for one in found]
    bases = {schema.base: name for (_, schema), name in zip(unpacked, members)}
    if len(bases) > 1:
        one, other = list(bases.values())[:2]
        raise UserError(f"{one} and {other} are of two bases: merge revisions of one base")
    made = merge_adapters([(adapter, s.config) for adapter, s in unpacked], weights, how)
    record = dataclasses.asdict(how) | {
        "rank": made.config.rank,
        "relative_error": made.error,
        "members": [
            {"policy": one.policy, "number": one.number, "digest": one.digest, "weight": float(w)}
            | _scores(catalog, one.digest)
            for one, w in zip(found, weights)
        ],
    }
    data = pack(made.adapter, Schema(next(iter(bases)), made.config))
    item = Export(policy, data, 0, origin=f"merge of {len(found)} revisions", merge=record)
    [revision] = exports.export_many(catalog, [item], create=True, **signed)
    return revision


def _scores(catalog: Handle, digest: str) -> dict[str, Any]:
    """Returns what was measured of a member: its newest evaluation, if there is one."""
    if not (found := training_records.list_evaluations(catalog, digest)):
        return {}
    newest = found[-1]
    metrics = {name: value for name, value in newest.metrics.items() if name != "rewards"}
    return {"evaluation": metrics | {"scorer": newest.scorer, "dataset": newest.dataset}}
