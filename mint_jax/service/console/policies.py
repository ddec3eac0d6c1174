"""Policies in the console: listed and searched, one with its lineage and curves, promoted and
rolled back.

With scope admin a visitor sees and moves the policies of all tenants; others see their own, and
move aliases with scope train. Another tenant's policy gets the same error as a missing one.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records import names
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.records.policies import PolicyRecord
from mint_jax.catalog.storage.payloads import StorageFailed
from mint_jax.errors import UserError
from mint_jax.service.book import Model, NotFound
from mint_jax.service.console.pages import Page, Visit, error_page, place_of, quoted, url_of
from mint_jax.service.errors import Forbidden
from mint_jax.service.queries import Natural
from mint_jax.service.server import Server
from mint_jax.service.validation import Body

LISTED = 50  # policies of a page
REVISIONS = 20  # of a policy's page, likewise its audit log
BRANCHES = 20
ANCESTORS = 10
ROLLOUTS = 1000  # points of the curve of rewards
FREQUENT = ("rollout", "checkpoint")  # log entries that a job makes at every step


class PoliciesQuery(Body):
    match: Annotated[str, Field(max_length=names.LONGEST)] = ""
    after: str | None = None
    state: Literal["active", "retired"] | None = None


class PolicyQuery(Body):
    below: Natural | None = None
    before: Natural | None = None
    log: str = ""
    done: str = ""


class VisiblePolicy(NamedTuple):
    """A policy that a visitor may see; ``record`` is None while nothing of it is exported, and
    ``model`` unless it was trained here.
    """

    name: str
    record: PolicyRecord | None
    model: Model | None


class Policies:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server, self.catalog = server, server.catalog

    def policies(self, visit: Visit) -> Page:
        """Shows a page of policies that match a search."""
        query = visit.fields(PoliciesQuery)
        after, state, match = query.after, query.state, query.match
        page = self.catalog.policies(visit.owner, after, LISTED + 1, state, match)
        listed = page[:LISTED]
        values = {
            "policies": [
                (one, url_of(one.policy), Schema.from_json(one.schema).config) for one in listed
            ],
            "aliases": self.catalog.aliases_of(listed),
            "match": match,
            "state": state or "",
            "next": listed[-1].policy if len(page) > LISTED else "",
            "first": after is None,
        }
        return Page("policies_rows.html" if visit.part else "policies.html", values)

    # -- one policy

    def policy(self, visit: Visit) -> Page:
        return self._page(visit, self._find(visit))

    def _find(self, visit: Visit) -> VisiblePolicy:
        """Returns the policy of a path. Raises ``NotFound``."""
        name = visit.path["policy"]
        missing = NotFound(f"there is no policy {name[:200]!r}")
        record = model = None
        try:
            owner, own = names.parse_policy(name)
        except UserError:
            raise missing from None
        if not visit.sees(owner):
            raise missing
        try:
            record = self.catalog.policy(name)
        except (DatabaseFailed, StorageFailed):
            raise
        except UserError:
            pass
        with contextlib.suppress(NotFound):
            model = self.server.book.model(owner, own)
        if record is None and model is None:
            raise missing
        return VisiblePolicy(names.full_name(owner, own), record, model)

    def _page(self, visit: Visit, policy: VisiblePolicy, error: UserError | None = None) -> Page:
        record, query = policy.record, visit.fields(PolicyQuery)
        values: dict[str, Any] = {
            "name": policy.name,
            "record": record,
            "model": policy.model,
            "place": "" if policy.model is None else place_of(self.server, policy.model),
            "may_move": (
                _may_move(visit, policy) and record is not None and record.state == "active"
            ),
            "url": url_of(policy.name),
            "quoted": quoted(policy.name),
            "done": query.done,
            "error": None if error is None else str(error)[:2000],
            "summaries": {kind: summary(curve) for kind, curve in self._curves(policy).items()},
        }
        if record is not None:
            values |= self._history(visit, query, record)
        return Page("policy.html", values, 200 if error is None else error_page(error).status)

    def _history(self, visit: Visit, query: PolicyQuery, record: PolicyRecord) -> dict[str, Any]:
        name, newest = record.policy, record.revisions + 1
        top = min(query.below or newest, newest) - 1
        revisions = self.catalog.revisions(name, max(0, top - REVISIONS), REVISIONS)[::-1]
        aliases = self.catalog.aliases(name)
        everything = query.log == "all"
        log = self.catalog.audit(
            name,
            newest=True,
            before=query.before,
            limit=REVISIONS + 1,
            without=() if everything else FREQUENT,
        )
        branches = self.catalog.branches(name, visit.owner, BRANCHES)
        return {
            "config": Schema.from_json(record.schema).config,
            "ancestors": list(self._ancestors(visit, record)),
            "branches": [(one.policy, one.parent, url_of(one.policy)) for one in branches],
            "revisions": revisions,
            "older": revisions[-1].number if revisions and revisions[-1].number > 1 else 0,
            "aliases": aliases,
            "aliases_of": {
                r.number: [a.name for a in aliases if a.number == r.number] for r in revisions
            },
            "scores": self.catalog.evaluations(name),
            "log_of": "all" if everything else "",
            "log": log[:REVISIONS],
            "log_before": log[REVISIONS - 1].id if len(log) > REVISIONS else 0,
        }

    def _ancestors(self, visit: Visit, record: PolicyRecord) -> Iterator[tuple[str, str]]:
        """Yields name and page of the revision that a policy branched from, of the one that this
        one's policy did, and so on, as far as the visitor sees them.
        """
        for _ in range(ANCESTORS):
            if record.parent is None:
                return
            policy = record.parent.rpartition("@")[0]
            if not visit.sees(names.parse_policy(policy)[0]):
                yield "a revision of another tenant", ""
                return
            yield record.parent, url_of(policy)
            record = self.catalog.policy(policy)

    def curves(self, visit: Visit) -> Page:
        return Page(data=self._curves(self._find(visit)))

    def _curves(self, policy: VisiblePolicy) -> dict[str, dict[str, Any]]:
        """Returns charts by name: x, y, and the unit of x. Loss and gradient norm of updates that
        this server made; rewards of jobs' rollouts.
        """
        record, model = policy.record, policy.model
        points = [] if model is None else self.server.curves.of(model.id)
        rollouts = [] if record is None else self.catalog.rollouts(policy.name, ROLLOUTS)[::-1]
        updates = [number for number, _ in points]
        rewards = [one.mean_reward for one in rollouts]
        charts = {
            "loss": (updates, [point.loss for _, point in points], "update"),
            "gradient norm": (updates, [point.grad_norm for _, point in points], "update"),
            "reward": ([one.step for one in rollouts], rewards, "step"),
        }
        return {
            kind: {"x": x, "y": y, "of": of}
            for kind, (x, y, of) in charts.items()
            if any(value is not None for value in y)
        }

    # -- aliases

    def promote(self, visit: Visit) -> Page:
        def move(policy: str, alias: str, **log: str) -> None:
            revision = visit.form.get("revision", "")
            if not names.is_number(revision):
                raise UserError(f"revision is {revision[:40]!r}; expected its number")
            self.catalog.promote(policy, int(revision), alias, **log)

        return self._moved(visit, "promoted", move)

    def rollback(self, visit: Visit) -> Page:
        return self._moved(visit, "rolled-back", self.catalog.rollback)

    def _moved(self, visit: Visit, done: str, move: Callable[..., Any]) -> Page:
        """Moves an alias, for a reason, unless it has moved since the page was made."""
        policy = self._find(visit)
        if not _may_move(visit, policy):
            raise Forbidden(
                f"moving an alias of {policy.name!r} needs scope admin, or train and its tenant:"
                " use another key"
            )
        try:
            if policy.record is None:
                raise UserError(f"policy {policy.name!r} has no revision yet: save one first")
            alias, why = visit.form.get("alias", "").strip(), visit.form.get("why", "").strip()
            if not why:
                raise UserError("the reason is empty: say why, for those who read the log")
            version = visit.form.get("version")
            for one in self.catalog.aliases(policy.name):
                if one.name == alias and version not in (None, str(one.version)):
                    raise UserError(
                        f"alias {alias!r} was moved to revision {one.number} meanwhile: look at it"
                        " again"
                    )
            move(policy.name, alias, by=f"{visit.tenant} in the console", why=why)
        except (DatabaseFailed, StorageFailed):
            raise
        except UserError as error:
            return self._page(visit, policy, error)
        return Page(to=f"{url_of(policy.name)}?done={done}")


def summary(curve: dict[str, Any]) -> str:
    """Describes a curve in words, for screen readers."""
    known = [(x, y) for x, y in zip(curve["x"], curve["y"]) if y is not None]
    (first, start), (last, end) = known[0], known[-1]
    low, high = min(y for _, y in known), max(y for _, y in known)
    unit = curve["of"]
    return (
        f"{start:.4g} at {unit} {first}, {end:.4g} at {unit} {last}; between {low:.4g} and"
        f" {high:.4g}"
    )


def _may_move(visit: Visit, policy: VisiblePolicy) -> bool:
    owner, _ = names.parse_policy(policy.name)
    return visit.may("admin") or (visit.may("train") and owner == visit.tenant)
