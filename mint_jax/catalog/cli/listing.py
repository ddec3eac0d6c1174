"""Commands that change nothing: ls, show, audit, rollouts, verify."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mint_jax.catalog.cli.output import ProgressLine, Result, facts, records, size, table, when
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import SCALES, Schema
from mint_jax.catalog.records import names
from mint_jax.catalog.records.evaluations import Evaluation
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.records.revisions import Revision
from mint_jax.catalog.rollouts import unpack_rollouts
from mint_jax.errors import UserError


def ls(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Lists a page of policies, or of one policy's revisions."""
    if args.policy is not None:
        if args.tenant or args.state or args.match or args.tag:
            raise UserError(
                "ls of one policy lists all its revisions: leave --tenant, --state, --tag and"
                " --match out"
            )
        found = catalog.revisions(args.policy, _number(args.after), args.limit)
        last = found[-1].number if len(found) == args.limit else None
        return _page({"revisions": found}, _revision_table("", found), last)
    page = catalog.policies(
        args.tenant, args.after, args.limit, args.state, args.match or "", dict(args.tag)
    )
    aliases, tags = catalog.aliases_of(page), catalog.tags_of(page)
    rows, data = [], []
    for one in page:
        own = {"aliases": aliases[one.policy], "tags": tags[one.policy]}
        data.append(policy_data(one) | own)
        config = Schema.from_json(one.schema).config
        shown = [one.policy, one.state, one.revisions, ", ".join(own["aliases"]), config.rank]
        shown += [",".join(config.targets), one.base[:12], one.parent, one.session_owner]
        rows.append([*shown, tags_text(own["tags"]), when(one.touched_at)])
    columns = "policy state #revisions aliases #rank targets base parent session tags changed"
    last = page[-1].policy if len(page) == args.limit else None
    return _page({"policies": data}, table("", columns.split(), rows), last)


def _page(data: dict[str, Any], shown: Table, last: str | int | None) -> Result:
    """A page; ``next`` is the argument of ``--after`` for the next one, null at the end."""
    more = [] if last is None else [f"There may be more: --after {last}"]
    return Result(data | {"next": None if last is None else str(last)}, [shown, *more])


def _number(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdecimal() and len(after) < 19):
        raise UserError(f"--after is {after[:40]!r}; the page before ended with a number")
    return int(after)


def tags_text(tags: Mapping[str, str]) -> str:
    """Returns ``key=value`` of each."""
    return ", ".join(f"{key}={value}" for key, value in tags.items())


def policy_data(record: PolicyRecord) -> dict[str, Any]:
    """Returns a policy for JSON, with its full name and its schema as an object."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {"policy": record.policy} | fields | {"schema": json.loads(record.schema)}


def show_one(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Shows a policy, or a revision."""
    if "@" in args.name or names.is_digest(args.name):
        return _show_revision(catalog, find_revision(catalog, args.name), args.limit)
    record = catalog.policy(args.name)
    revisions = catalog.revisions(args.name, max(0, record.revisions - args.limit), args.limit)
    aliases, evaluations = catalog.aliases(args.name), catalog.evaluations(args.name, args.limit)
    tags, schema = catalog.tags(args.name), Schema.from_json(record.schema)
    data = {
        "policy": policy_data(record),
        "tags": tags,
        "aliases": aliases,
        "revisions": revisions,
        "evaluations": evaluations,
    }
    session = None
    if record.session_owner is not None:
        until = when(record.session_expires)
        session = f"{record.session_owner} (number {record.session_number}, until {until})"
    shown = facts(
        record.policy,
        [
            ("state", record.state),
            ("base", record.base),
            ("rank", schema.config.rank),
            ("alpha", schema.config.alpha),
            ("scale", SCALES[schema.config.rslora]),
            ("targets", ", ".join(schema.config.targets)),
            ("dtype", schema.dtype),
            ("parent", record.parent),
            ("tags", tags_text(tags) or None),
            ("keep last", "all" if record.keep_last is None else record.keep_last),
            ("revisions made", record.revisions),
            ("session", session),
            ("created", when(record.created_at)),
            ("changed", when(record.touched_at)),
        ],
    )
    moved = records("aliases", aliases, "name number digest version updated_at")
    listed = _revision_table("revisions", revisions)
    return Result(data, [shown, moved, listed, *_evaluation_table(evaluations)])


def find_revision(catalog: Catalog, name: str) -> Revision:
    """Returns a revision by ``policy@…`` (retired ones too) or digest."""
    policy, at, which = name.partition("@")
    if not at:
        found = catalog.resolve(name)
        return catalog.revision(found.policy, found.number)
    return catalog.revision(
        policy, int(which) if names.is_number(which) else names.clean_alias(which)
    )


def _show_revision(catalog: Catalog, revision: Revision, limit: int) -> Result:
    full, record = f"{revision.policy}@{revision.number}", catalog.policy(revision.policy)
    aliases = [one for one in catalog.aliases(revision.policy) if one.number == revision.number]
    evaluations, tags = catalog.evaluations(revision.digest, limit), catalog.tags(full)
    data = {
        "revision": revision,
        "policy": policy_data(record),
        "tags": tags,
        "aliases": aliases,
        "evaluations": evaluations,
    }
    shown = facts(
        full,
        [
            ("digest", revision.digest),
            ("base", record.base),
            ("step", revision.step),
            ("bytes", f"{revision.bytes:,}"),
            ("origin", revision.origin or None),
            ("sampling", None if revision.sampling is None else json.dumps(revision.sampling)),
            ("state", revision.state),
            ("pinned", revision.pinned),
            ("aliases", ", ".join(alias.name for alias in aliases) or None),
            ("tags", tags_text(tags) or None),
            ("created", when(revision.created_at)),
        ],
    )
    return Result(data, [shown, *_evaluation_table(evaluations)])


def _revision_table(title: str, revisions: Sequence[Revision]) -> Table:
    return records(title, revisions, "number step digest bytes state pinned origin created_at")


def _evaluation_table(found: Sequence[Evaluation]) -> list[Table]:
    """A table of scores; none without scores."""
    rows = []
    for one in found:
        metrics = ", ".join(
            f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in one.metrics.items()
        )
        revision = "removed" if one.policy is None else f"{one.policy}@{one.number}"
        shown = [revision, one.digest[:12], one.scorer, one.renderer, one.dataset[:12]]
        rows.append([*shown, one.seed, one.isolated, one.shared, metrics])
    columns = ("revision", "digest", "scorer", "renderer", "dataset")
    columns += ("#seed", "#isolated", "#shared", "metrics")
    return [table("evaluations", columns, rows)] if rows else []


def audit(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Lists a page of the audit log: all of it, one policy's, or the moves of one alias."""
    options = {"after": _number(args.after), "limit": args.limit}
    policy, at, alias = (args.name or "").partition("@")
    if at:
        entries = catalog.history(policy, alias, **options)
        named = [one.name for one in catalog.aliases(policy)]
        if not entries and args.after is None and alias not in named:
            raise UserError(
                f"policy {policy!r} never had an alias {alias!r}: show lists its aliases"
            )
    else:
        entries = catalog.audit(policy or None, **options)
    columns = "id at action policy alias before after actor why details"
    last = entries[-1].id if len(entries) == args.limit else None
    return _page({"entries": entries}, records("", entries, columns), last)


def rollouts(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Lists a policy's stored rollouts, newest first, or shows those of one step."""
    found = catalog.rollouts(args.policy, args.limit)
    if args.action == "list":
        shown = records("", found, "step tokens mean_reward digest created_at")
        return Result({"rollouts": found}, [shown])
    chosen = [one for one in found if args.step in (None, one.step)]
    if not chosen:
        step = "" if args.step is None else f" of step {args.step}"
        raise UserError(f"policy {args.policy!r} has no rollouts{step}: list them")
    batch = unpack_rollouts(catalog.read_rollout(chosen[0]))
    samples = []
    for q, prompt in enumerate(batch.prompts):
        for g, tokens in enumerate(batch.tokens[q]):
            samples.append(
                {
                    "prompt": prompt,
                    "tokens": tokens,
                    "logprobs": batch.logprobs[q][g],
                    "revisions": batch.revisions[q][g],
                    "reward": float(batch.rewards[q, g]),
                }
            )
    rows = []
    for k, one in enumerate(samples):
        drawn = ", ".join(digest[:12] for digest in dict.fromkeys(one["revisions"]))
        counts = (len(one["prompt"]), len(one["tokens"]), one["reward"])
        rows.append((k, *counts, drawn, " ".join(map(str, one["tokens"]))))
    columns = ("#sample", "#prompt tokens", "#tokens", "#reward", "revisions", "token ids")
    title = f"{args.policy}, step {batch.step}"
    data = {"policy": args.policy, "step": batch.step, "samples": samples}
    return Result(data, [table(title, columns, rows)])


def verify(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Lists what is damaged; status 1 if anything is."""
    checked = [0, 0]
    if args.name is not None:
        checked = [1, catalog.resolve(args.name).place.length]
        findings = list(catalog.verify(args.name))
    else:
        progress, total = ProgressLine("verify: payloads"), catalog.stats()["payloads"]

        def at(count: int, bytes: int) -> None:
            checked[:] = count, bytes
            progress.at(count, total)

        findings = list(catalog.verify(progress=at))
        progress.end()
    data = {"payloads": checked[0], "bytes": checked[1], "findings": findings}
    if not findings:
        return Result(data, [f"{checked[0]:,} payloads, {size(checked[1])}: nothing is damaged"])
    return Result(data, [records("damaged", findings, "kind digest revisions what")], 1)
