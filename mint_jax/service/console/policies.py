"""Policies in the console: listed and searched, one with its lineage and curves, promoted and
rolled back.

Who has scope admin sees and moves all tenants' policies. Others see their own, and move aliases
with scope train. What is another tenant's is not there, in the words of what is not there.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records import names
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.storage.interface import StorageFailed
from mint_jax.errors import UserError
from mint_jax.service.book import Model, NotFound
from mint_jax.service.console.pages import Asked, Page, of_error, quoted, url_of
from mint_jax.service.console.sessions import UNDER
from mint_jax.service.errors import Forbidden
from mint_jax.service.server import Server

LISTED = 50  # policies of a page
REVISIONS = 20  # of a policy's page, likewise its audit log
BRANCHES = 20
ANCESTORS = 10
ROLLOUTS = 1000  # points of the curve of rewards
MANY = ("rollout", "checkpoint")  # entries of the log that a job makes at every step
STATES = ("active", "retired")


@dataclasses.dataclass(frozen=True)
class Seen:
    """A policy that the one who asks may see: its record, None while nothing of it is exported; its
    model, if trained here.
    """

    name: str
    record: PolicyRecord | None
    model: Model | None


class Policies:
    """The handlers over one server."""

    def __init__(self, server: Server):
        self.server, self.catalog = server, server.catalog

    # -- the list

    def listed(self, asked: Asked) -> Page:
        match, after, state = (
            asked.query.get("match", ""),
            asked.query.get("after") or None,
            asked.query.get("state") or None,
        )
        if state is not None and state not in STATES:
            raise UserError(
                f"state is {state[:40]!r}; expected {' or '.join(STATES)}, or none for both"
            )
        if len(match) > names.LONGEST:
            raise UserError(
                f"the search has {len(match)} characters; names have at most {names.LONGEST}"
            )
        tenant = None if asked.everything else asked.tenant
        page = self.catalog.policies(tenant, after, LISTED + 1, state, match)
        shown, more = page[:LISTED], len(page) > LISTED
        values = {
            "policies": [
                (one, url_of(one.policy), Schema.from_json(one.schema).config) for one in shown
            ],
            "aliases": self.catalog.aliases_of(shown),
            "match": match,
            "state": state or "",
            "next": shown[-1].policy if more else "",
            "first": after is None,
        }
        return Page("policies_rows.html" if asked.part else "policies.html", values)

    # -- one policy

    def shown(self, asked: Asked) -> Page:
        return self._page(asked, self._seen(asked))

    def _seen(self, asked: Asked) -> Seen:
        """
        Raises:
            NotFound: there is none, or it is another tenant's.
        """
        name = asked.path["policy"]
        try:
            owner, own = names.parse_policy(name)
        except UserError:
            owner, own = "", ""
        if not own or not (asked.everything or owner == asked.tenant):
            raise NotFound(f"there is no policy {name[:200]!r}")
        record = model = None
        try:
            record = self.catalog.policy(name)
        except (DatabaseFailed, StorageFailed):
            raise
        except UserError:
            pass
        with contextlib.suppress(NotFound):
            model = self.server.book.model(owner, own)
        if record is None and model is None:
            raise NotFound(f"there is no policy {name[:200]!r}")
        return Seen(names.full_name(owner, own), record, model)

    def _page(self, asked: Asked, seen: Seen, error: UserError | None = None) -> Page:
        values: dict[str, Any] = {
            "name": seen.name,
            "record": seen.record,
            "model": seen.model,
            "place": self._place(seen),
            "may_move": (
                _may_move(asked, seen) and seen.record is not None and seen.record.state == "active"
            ),
            "url": url_of(seen.name),
            "quoted": quoted(seen.name),
            "done": asked.query.get("done", ""),
            "error": None if error is None else str(error)[:2000],
            "summaries": {kind: summary(curve) for kind, curve in self._curves(seen).items()},
        }
        if seen.record is not None:
            values |= self._history(asked, seen.record)
        return Page("policy.html", values, 200 if error is None else of_error(error).status)

    def _history(self, asked: Asked, record: PolicyRecord) -> dict[str, Any]:
        name, top = (
            record.policy,
            min(_whole(asked, "below") or record.revisions + 1, record.revisions + 1) - 1,
        )
        revisions = self.catalog.revisions(name, max(0, top - REVISIONS), REVISIONS)[::-1]
        aliases, scores = self.catalog.aliases(name), self.catalog.evaluations(name)
        log_of = "all" if asked.query.get("log") == "all" else ""
        log = self.catalog.recent(
            name,
            before=_whole(asked, "before"),
            limit=REVISIONS + 1,
            without=() if log_of else MANY,
        )
        tenant = None if asked.everything else asked.tenant
        return {
            "config": Schema.from_json(record.schema).config,
            "ancestors": list(self._ancestors(asked, record)),
            "branches": [
                (one.policy, one.parent, url_of(one.policy))
                for one in self.catalog.branches(name, tenant, BRANCHES)
            ],
            "revisions": revisions,
            "older": revisions[-1].number if revisions and revisions[-1].number > 1 else 0,
            "aliases": aliases,
            "aliases_of": {
                r.number: [a.name for a in aliases if a.number == r.number] for r in revisions
            },
            "scores": scores,
            "log_of": log_of,
            "log": log[:REVISIONS],
            "log_before": log[REVISIONS - 1].id if len(log) > REVISIONS else 0,
        }

    def _ancestors(self, asked: Asked, record: PolicyRecord) -> Iterator[tuple[str, str]]:
        """The revision that a policy branched from, the one that this one's policy did, and so on:
        names and pages, as far as they are for the one who asks.
        """
        for _ in range(ANCESTORS):
            if record.parent is None:
                return
            policy = record.parent.rpartition("@")[0]
            if not (asked.everything or names.parse_policy(policy)[0] == asked.tenant):
                yield "a revision of another tenant", ""
                return
            yield record.parent, url_of(policy)
            record = self.catalog.policy(policy)

    def _place(self, seen: Seen) -> str:
        """Where a policy's training state is; empty where it is not in training."""
        live = self.server.live
        try:
            return (
                live.where(seen.model.id)
                if seen.model is not None and seen.model.ended is None
                else ""
            )
        except UserError:
            return ""

    # -- its curves

    def curves(self, asked: Asked) -> Page:
        return Page(data=self._curves(self._seen(asked)))

    def _curves(self, seen: Seen) -> dict[str, dict[str, Any]]:
        """Charts by name: x, y, and what x counts. Loss and gradient norm of updates that this
        server made; rewards of jobs' rollouts.
        """
        points = [] if seen.model is None else self.server.curves.of(seen.model.id)
        rollouts = [] if seen.record is None else self.catalog.rollouts(seen.name, ROLLOUTS)[::-1]
        numbers = [number for number, _ in points]
        found = {
            "loss": {"x": numbers, "y": [point.loss for _, point in points], "of": "update"},
            "gradient norm": {
                "x": numbers,
                "y": [point.grad_norm for _, point in points],
                "of": "update",
            },
            "reward": {
                "x": [one.step for one in rollouts],
                "y": [one.mean_reward for one in rollouts],
                "of": "step",
            },
        }
        return {
            kind: curve for kind, curve in found.items() if any(y is not None for y in curve["y"])
        }

    # -- its aliases

    def promote(self, asked: Asked) -> Page:
        def move(policy: str, alias: str, why: str, by: str) -> None:
            revision = asked.form.get("revision", "")
            if not names.is_number(revision):
                raise UserError(f"revision is {revision[:40]!r}; expected its number")
            self.catalog.promote(policy, int(revision), alias, by=by, why=why)

        return self._moved(asked, "promoted", move)

    def rollback(self, asked: Asked) -> Page:
        def move(policy: str, alias: str, why: str, by: str) -> None:
            self.catalog.rollback(policy, alias, by=by, why=why)

        return self._moved(asked, "rolled-back", move)

    def _moved(self, asked: Asked, done: str, move: Any) -> Page:
        """Moves an alias, for a reason, unless somebody else has moved it since the page was
        made.
        """
        seen = self._seen(asked)
        if not _may_move(asked, seen):
            raise Forbidden(
                f"moving an alias of {seen.name!r} needs scope admin, or train and its tenant: use"
                " another key"
            )
        try:
            if seen.record is None:
                raise UserError(f"policy {seen.name!r} has no revision yet: save one first")
            alias, why = asked.form.get("alias", "").strip(), asked.form.get("why", "").strip()
            if not why:
                raise UserError("the reason is empty: say why, for those who read the log")
            self._need_unmoved(seen.name, alias, asked.form.get("version"))
            move(seen.name, alias, why, f"{asked.tenant} in the console")
        except (DatabaseFailed, StorageFailed):
            raise
        except UserError as error:
            return self._page(asked, seen, error)
        return Page(to=f"{UNDER}/policies/{quoted(seen.name)}?done={done}")

    def _need_unmoved(self, policy: str, alias: str, version: str | None) -> None:
        """
        Raises:
            UserError: the alias that the form was about has moved since.
        """
        now = next((one for one in self.catalog.aliases(policy) if one.name == alias), None)
        if now is not None and version is not None and str(now.version) != version:
            raise UserError(
                f"alias {alias!r} was moved to revision {now.number} meanwhile: look at it again"
            )


def summary(curve: dict[str, Any]) -> str:
    """A curve in words, for who does not see it."""
    known = [(x, y) for x, y in zip(curve["x"], curve["y"]) if y is not None]
    (first, begin), (last, end) = known[0], known[-1]
    low, high = min(y for _, y in known), max(y for _, y in known)
    return (
        f"{begin:.4g} at {curve['of']} {first}, {end:.4g} at {curve['of']} {last}; between"
        f" {low:.4g} and {high:.4g}"
    )


def _may_move(asked: Asked, seen: Seen) -> bool:
    owner, _ = names.parse_policy(seen.name)
    return asked.may("admin") or (asked.may("train") and owner == asked.tenant)


def _whole(asked: Asked, field: str) -> int | None:
    told = asked.query.get(field, "")
    if told and not (told.isascii() and told.isdecimal() and len(told) < 16):
        raise UserError(f"{field} is {told[:40]!r}; expected a number")
    return int(told) if told else None
