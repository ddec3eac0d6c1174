"""Commands that change nothing: ls, show, history, audit, evaluations, rollouts, verify, stats."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mint_jax.catalog.cli.output import Progress, Result, facts, size, table, when
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records import names
from mint_jax.catalog.records.aliases import Alias
from mint_jax.catalog.records.audit import AuditEntry
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.records.revisions import Revision
from mint_jax.catalog.records.work import Evaluation
from mint_jax.errors import UserError


def ls(args: argparse.Namespace, catalog: Catalog) -> Result:
    """A page of policies, or of one policy's revisions."""
    if args.policy is not None:
        if args.tenant or args.state or args.match or args.tag:
            raise UserError(
                "ls of one policy lists all its revisions: leave --tenant, --state, --tag and"
                " --match out"
            )
        found = catalog.revisions(args.policy, _number(args.after), args.limit)
        last = str(found[-1].number) if len(found) == args.limit else None
        return _page({"revisions": found}, [_revision_table("", found)], last)
    page = catalog.policies(
        args.tenant, args.after, args.limit, args.state, args.match or "", dict(args.tag)
    )
    aliases, tags = catalog.aliases_of(page), catalog.tags_of(page)
    columns = (
        "policy",
        "state",
        "#revisions",
        "aliases",
        "#rank",
        "targets",
        "base",
        "parent",
        "session",
        "tags",
        "changed",
    )
    rows = []
    for one in page:
        config = Schema.from_json(one.schema).config
        targets = ",".join(config.targets)
        rows.append(
            (
                one.policy,
                one.state,
                one.revisions,
                ", ".join(aliases[one.policy]),
                config.rank,
                targets,
                one.base[:12],
                one.parent,
                one.session_owner,
                tags_text(tags[one.policy]),
                when(one.touched_at),
            )
        )
    last = page[-1].policy if len(page) == args.limit else None
    data = [
        policy_data(one) | {"aliases": aliases[one.policy], "tags": tags[one.policy]}
        for one in page
    ]
    return _page({"policies": data}, [table("", columns, rows)], last)


def _page(data: dict[str, Any], parts: list[Any], last: str | None) -> Result:
    """``next`` is what ``--after`` continues with; null at the end."""
    return Result(
        data | {"next": last},
        parts + ([] if last is None else [f"There may be more: --after {last}"]),
    )


def _number(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdecimal() and len(after) < 19):
        raise UserError(f"--after is {after[:40]!r}; the page before ended with a number")
    return int(after)


def tags_text(tags: Mapping[str, str]) -> str:
    """``key=value`` of each."""
    return ", ".join(f"{key}={value}" for key, value in tags.items())


def policy_data(record: PolicyRecord) -> dict[str, Any]:
    """A policy for JSON: with its full name, and its schema as an object."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {"policy": record.policy} | fields | {"schema": json.loads(record.schema)}


def show(args: argparse.Namespace, catalog: Catalog) -> Result:
    """A policy, or a revision."""
    if "@" in args.name or names.is_digest(args.name):
        return _show_revision(catalog, find_revision(catalog, args.name), args.limit)
    record = catalog.policy(args.name)
    revisions = catalog.revisions(args.name, max(0, record.revisions - args.limit), args.limit)
    aliases, evaluations = catalog.aliases(args.name), catalog.evaluations(args.name, args.limit)
    tags = catalog.tags(args.name)
    data = {
        "policy": policy_data(record),
        "tags": tags,
        "aliases": aliases,
        "revisions": revisions,
        "evaluations": evaluations,
    }
    config = Schema.from_json(record.schema)
    session = None
    if record.session_owner is not None:
        session = (
            f"{record.session_owner} (number {record.session_number}, until"
            f" {when(record.session_expires)})"
        )
    parts = [
        facts(
            record.policy,
            [
                ("state", record.state),
                ("base", record.base),
                ("rank", config.config.rank),
                ("alpha", config.config.alpha),
                ("scale", "alpha/sqrt(rank)" if config.config.rslora else "alpha/rank"),
                ("targets", ", ".join(config.config.targets)),
                ("dtype", config.dtype),
                ("parent", record.parent),
                ("tags", tags_text(tags) or None),
                ("keep last", "all" if record.keep_last is None else record.keep_last),
                ("revisions made", record.revisions),
                ("session", session),
                ("created", when(record.created_at)),
                ("changed", when(record.touched_at)),
            ],
        ),
        _alias_table(aliases),
        _revision_table("revisions", revisions),
    ]
    return Result(data, parts + ([_evaluation_table(evaluations)] if evaluations else []))


def find_revision(catalog: Catalog, name: str) -> Revision:
    """A revision by ``policy@…`` or digest. Retired ones are found by the former."""
    policy, at, which = name.partition("@")
    if not at:
        found = catalog.resolve(name)
        return catalog.revision(found.policy, found.number)
    return catalog.revision(
        policy, int(which) if names.is_number(which) else names.clean_alias(which)
    )


def _show_revision(catalog: Catalog, revision: Revision, limit: int) -> Result:
    aliases = [
        alias for alias in catalog.aliases(revision.policy) if alias.number == revision.number
    ]
    evaluations = catalog.evaluations_of(revision.digest, limit)
    record = catalog.policy(revision.policy)
    tags = catalog.tags(f"{revision.policy}@{revision.number}")
    data = {
        "revision": revision,
        "policy": policy_data(record),
        "tags": tags,
        "aliases": aliases,
        "evaluations": evaluations,
    }
    parts: list = [
        facts(
            f"{revision.policy}@{revision.number}",
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
    ]
    return Result(data, parts + ([_evaluation_table(evaluations)] if evaluations else []))


def _revision_table(title: str, revisions: Sequence[Revision]):
    columns = ("#number", "#step", "digest", "#bytes", "state", "pinned", "origin", "created")
    rows = [
        (
            r.number,
            r.step,
            r.digest[:12],
            f"{r.bytes:,}",
            r.state,
            r.pinned,
            r.origin,
            when(r.created_at),
        )
        for r in revisions
    ]
    return table(title, columns, rows)


def _alias_table(aliases: Sequence[Alias]):
    rows = [(a.name, a.number, a.digest[:12], a.version, when(a.updated_at)) for a in aliases]
    return table("aliases", ("alias", "#revision", "digest", "#moves", "moved"), rows)


def _evaluation_table(found: Sequence[Evaluation]):
    rows = []
    for one in found:
        revision = "removed" if one.policy is None else f"{one.policy}@{one.number}"
        metrics = ", ".join(
            f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in one.metrics.items()
        )
        rows.append(
            (
                revision,
                one.digest[:12],
                one.scorer,
                one.renderer,
                one.dataset[:12],
                one.seed,
                one.isolated,
                one.shared,
                metrics,
            )
        )
    columns = (
        "revision",
        "digest",
        "scorer",
        "renderer",
        "dataset",
        "#seed",
        "#isolated",
        "#shared",
        "metrics",
    )
    return table("evaluations", columns, rows)


def history(args: argparse.Namespace, catalog: Catalog) -> Result:
    """The moves of an alias, or what it was at a time."""
    if args.at is not None:
        found = catalog.alias_at(args.policy, args.alias, args.at)
        return Result(
            {"alias": found},
            [
                (
                    f"{args.policy} had no alias {args.alias} yet"
                    if found is None
                    else _alias_table([found])
                )
            ],
        )
    moves = catalog.history(args.policy, args.alias, after=_number(args.after), limit=args.limit)
    if (
        not moves
        and args.after is None
        and args.alias not in [alias.name for alias in catalog.aliases(args.policy)]
    ):
        raise UserError(
            f"policy {args.policy!r} never had an alias {args.alias!r}: show lists its aliases"
        )
    columns = ("#id", "at", "action", "#from", "#to", "by", "why")
    rows = [(m.id, when(m.at), m.action, m.before, m.after, m.actor, m.why) for m in moves]
    last = str(moves[-1].id) if len(moves) == args.limit else None
    return _page({"moves": moves}, [table(f"{args.policy}@{args.alias}", columns, rows)], last)


def audit(args: argparse.Namespace, catalog: Catalog) -> Result:
    """A page of the audit log."""
    entries = catalog.audit(args.policy, after=_number(args.after), limit=args.limit)
    columns = ("#id", "at", "action", "policy", "alias", "#from", "#to", "by", "why", "details")
    rows = [
        (
            e.id,
            when(e.at),
            e.action,
            e.policy,
            e.alias,
            e.before,
            e.after,
            e.actor,
            e.why,
            _details(e),
        )
        for e in entries
    ]
    last = str(entries[-1].id) if len(entries) == args.limit else None
    return _page({"entries": entries}, [table("", columns, rows)], last)


def _details(entry: AuditEntry) -> str:
    text = json.dumps(entry.details, sort_keys=True) if entry.details else ""
    return text if len(text) <= 60 else text[:57] + "..."


def evaluations(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Scores."""
    found = catalog.evaluations(args.name, args.limit)
    return Result({"evaluations": found}, [_evaluation_table(found)])


def rollouts(args: argparse.Namespace, catalog: Catalog) -> Result:
    """What training kept of its last steps."""
    found = catalog.rollouts(args.policy, args.limit)
    rows = [
        (one.step, one.tokens, f"{one.mean_reward:.4g}", one.digest[:12], when(one.created_at))
        for one in found
    ]
    return Result(
        {"rollouts": found},
        [table("", ("#step", "#tokens", "#mean reward", "digest", "created"), rows)],
    )


def verify(args: argparse.Namespace, catalog: Catalog) -> Result:
    """What is damaged; status 1 if anything is."""
    findings, checked = [], [0, 0]
    if args.name is not None:
        findings += catalog.verify(args.name)
        checked = [1, catalog.resolve(args.name).place.length]
    else:
        progress = Progress("verify: payloads", catalog.stats()["payloads"])

        def at(count: int, total: int) -> None:
            checked[:] = count, total
            progress.at(count, size(total))

        findings += catalog.verify(progress=at)
        progress.end(checked[0], size(checked[1]))
    data = {"payloads": checked[0], "bytes": checked[1], "findings": findings}
    if not findings:
        return Result(data, [f"{checked[0]:,} payloads, {size(checked[1])}: nothing is damaged"])
    rows = [
        (f.kind, f.digest[:12] if f.digest else None, ", ".join(f.revisions), f.what)
        for f in findings
    ]
    return Result(data, [table("damaged", ("kind", "digest", "revisions", "what"), rows)], 1)


def stats(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Counts and bytes."""
    found = catalog.stats()
    shown = [
        (
            name.replace("_", " "),
            f"{count:,}" + (f" ({size(count)})" if name.endswith("bytes") else ""),
        )
        for name, count in found.items()
    ]
    return Result(found, [table("", ("what", "#count"), shown)])
