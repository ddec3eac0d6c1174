"""The catalog against a model of it: a few dicts and lists that say what every call must answer.

Hypothesis makes sequences of calls with valid and invalid arguments; after each, names, histories
and bytes must be those of the model, and a refused call must have changed nothing.
"""

import dataclasses
import shutil

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from tests.catalog.adapters import SCHEMA, packed
from tests.catalog.conftest import empty, same_bytes
from tests.residency.clock import Clock

# No text is SQL, a pattern, a format or a path; the last name looks like p.
NAMES = ("p", "lab/'; DROP TABLE policies; --%", "\u0440")
ALIASES = ("%s' -- ${x}\\", "latest")
VALUES = st.integers(0, 5)  # few, so that equal bytes meet
NUMBERS = st.integers(1, 5)


@dataclasses.dataclass
class Revision:
    digest: str
    step: int
    pinned: bool = False
    retired: bool = False


@dataclasses.dataclass
class Policy:
    revisions: dict[int, Revision] = dataclasses.field(default_factory=dict)
    count: int = 0
    # alias -> (before, after)
    moves: dict[str, list[tuple[int | None, int]]] = dataclasses.field(default_factory=dict)
    # alias -> what a rollback goes back through
    stacks: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    keep_last: int | None = None
    retired: bool = False
    session: int = 0
    owner: str | None = None
    began: int | None = None
    # (number or 0, key) -> value
    tags: dict[tuple[int, str], str] = dataclasses.field(default_factory=dict)

    def move(self, alias: str, number: int) -> None:
        stack = self.stacks.setdefault(alias, [])
        self.moves.setdefault(alias, []).append((stack[-1] if stack else None, number))
        stack.append(number)


def digest_of(value: int) -> str:
    return blake3(packed(value)).hexdigest()


BYTES = {digest_of(value): packed(value) for value in range(6)}


class Machine(RuleBasedStateMachine):
    """``place`` and ``folder`` are set by the test."""

    place = folder = ""
    sessions = Bundle("sessions")

    def __init__(self):
        super().__init__()
        if self.place:
            empty(self.place)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.clock = Clock(1_000_000.0)
        self.handles = [self.opened(), self.opened()]
        self.policies: dict[str, Policy] = {}
        self.leases: list = []
        self.trained: dict[tuple[int, int], Policy] = {}  # whose a session is

    def opened(self) -> Catalog:
        return Catalog.open(
            self.place or self.folder, f"{self.folder}/payloads", clock=self.clock, actor="model"
        )

    @property
    def catalog(self) -> Catalog:
        """One of two handles, in turn: what one has done, the other must see at once."""
        self.handles.reverse()
        return self.handles[0]

    def teardown(self):
        assert list(self.catalog.verify()) == []
        for name, policy in self.policies.items():
            for alias, moves in policy.moves.items():
                entries = self.catalog.audit(name, alias=alias)
                assert [(entry.before, entry.after) for entry in entries] == moves
            for number, revision in policy.revisions.items():
                if self.active(name) and not revision.retired:
                    assert same_bytes(self.catalog.load(f"{name}@{number}"), BYTES[revision.digest])
        for handle in self.handles:
            handle.close()

    @rule()
    def reopen(self):
        self.handles.pop().close()
        self.handles.append(self.opened())

    def refused(self, call, *arguments, **options) -> None:
        audit = len(self.catalog.audit(limit=10**6))
        with pytest.raises(UserError):
            call(*arguments, **options)
        assert len(self.catalog.audit(limit=10**6)) == audit

    def active(self, name: str) -> Policy | None:
        policy = self.policies.get(name)
        return None if policy is None or policy.retired else policy

    def live(self, name: str, number: int) -> Revision | None:
        policy = self.policies.get(name)
        revision = None if policy is None else policy.revisions.get(number)
        return None if revision is None or revision.retired else revision

    @initialize(
        values=st.lists(VALUES, min_size=4, max_size=4), keep_last=st.sampled_from([None, 1, 2])
    )
    def begin(self, values, keep_last):
        """Most calls need a policy with a past."""
        self.create("p", keep_last)
        self.export([("p", value, step) for step, value in enumerate(values)], False)
        for number in sorted(self.policies["p"].revisions):
            self.promote("p", number, ALIASES[0])

    @rule(name=st.sampled_from(NAMES), keep_last=st.sampled_from([None, 1, 2]))
    def create(self, name, keep_last):
        if name in self.policies:
            self.refused(self.catalog.create_policy, name, SCHEMA)
            return
        self.catalog.create_policy(name, SCHEMA, keep_last=keep_last)
        self.policies[name] = Policy(keep_last=keep_last)

    @rule(
        items=st.lists(
            st.tuples(st.sampled_from(NAMES), VALUES, st.integers(0, 2)), min_size=1, max_size=4
        ),
        create=st.booleans(),
    )
    def export(self, items, create):
        exports = [Export(name, packed(value), step) for name, value, step in items]
        names = {name for name, _, _ in items}
        writable = {name for name in names if self.active(name) and not self.policies[name].owner}
        if names - writable - (set() if not create else names - self.policies.keys()):
            self.refused(self.catalog.export_many, exports, create=create)
            return
        made = self.catalog.export_many(exports, create=create)
        for (name, value, step), revision in zip(items, made):
            assert revision.number == self.add(name, value, step)
            assert revision.digest == digest_of(value)

    def add(self, name, value, step) -> int:
        policy = self.policies.setdefault(name, Policy())
        same = [
            n
            for n, r in policy.revisions.items()
            if (r.digest, r.step, r.retired) == (digest_of(value), step, False)
        ]
        # Bytes may be there twice at one step only where one was retired and restored since.
        number = same[-1] if same else policy.count + 1
        if not same:
            policy.count += 1
            policy.revisions[number] = Revision(digest_of(value), step)
        if not policy.stacks.get("latest") or policy.stacks["latest"][-1] != number:
            policy.move("latest", number)
        return number

    @rule(name=st.sampled_from(NAMES), number=NUMBERS, alias=st.sampled_from(ALIASES))
    def promote(self, name, number, alias):
        policy = self.active(name)
        if policy is None or self.live(name, number) is None:
            self.refused(self.catalog.promote, name, number, alias)
            return
        assert self.catalog.promote(name, number, alias).number == number
        if not policy.stacks.get(alias) or policy.stacks[alias][-1] != number:
            policy.move(alias, number)

    @rule(name=st.sampled_from(NAMES), alias=st.sampled_from(ALIASES), number=NUMBERS)
    def rollback_to(self, name, alias, number):
        self.rollback(name, alias, number)

    @rule(name=st.sampled_from(NAMES[:2]), alias=st.sampled_from(ALIASES), to=st.none())
    def rollback(self, name, alias, to):
        policy = self.active(name)
        stack = [] if policy is None else policy.stacks.get(alias, [])
        under = stack[:-1]
        if to is not None:
            while under and under[-1] != to:
                under = under[:-1]
        if not under or self.live(name, under[-1]) is None:
            self.refused(self.catalog.rollback, name, alias, to=to)
            return
        assert self.catalog.rollback(name, alias, to=to).number == under[-1]
        policy.moves[alias].append((stack[-1], under[-1]))
        policy.stacks[alias] = under

    @rule(name=st.sampled_from(NAMES[1:]), restore=st.booleans())
    def retire_policy(self, name, restore):
        call = self.catalog.restore if restore else self.catalog.retire
        if name not in self.policies:
            self.refused(call, name)
            return
        call(name)
        self.policies[name].retired = not restore

    @rule(name=st.sampled_from(NAMES), number=NUMBERS, restore=st.booleans())
    def retire_revision(self, name, number, restore):
        call = self.catalog.restore if restore else self.catalog.retire
        policy = self.policies.get(name)
        revision = None if policy is None else policy.revisions.get(number)
        named = revision is not None and number in [stack[-1] for stack in policy.stacks.values()]
        if revision is None or (named and not restore):
            self.refused(call, name, number)
            return
        call(name, number)
        revision.retired = not restore

    @rule(name=st.sampled_from(NAMES), number=NUMBERS, pinned=st.booleans())
    def pin(self, name, number, pinned):
        call = self.catalog.pin if pinned else self.catalog.unpin
        revision = self.policies[name].revisions.get(number) if name in self.policies else None
        if revision is None:
            self.refused(call, name, number)
            return
        call(name, number)
        revision.pinned = pinned

    @rule(name=st.sampled_from(NAMES), number=NUMBERS)
    def lease(self, name, number):
        if self.active(name) is None or self.live(name, number) is None:
            self.refused(self.catalog.lease, [f"{name}@{number}"], "model")
            return
        self.leases += self.catalog.lease([f"{name}@{number}"], "model", 1e6)

    @rule()
    def release(self):
        for lease in self.leases:
            self.catalog.release(lease)
        self.leases = []

    @rule(
        target=sessions,
        name=st.sampled_from(NAMES),
        owner=st.sampled_from(["a", "b"]),
        instead_of=st.sampled_from([None, "a", "b"]),
    )
    def open_session(self, name, owner, instead_of):
        policy = self.active(name)
        if policy is None or policy.owner not in (None, owner, instead_of):
            self.refused(self.catalog.open_session, name, owner, 1e6, instead_of=instead_of)
            return None
        session = self.catalog.open_session(name, owner, 1e6, instead_of=instead_of)
        policy.session += 1
        policy.owner, policy.began = owner, policy.stacks.get("latest", [None])[-1]
        assert (session.number, session.start) == (policy.session, policy.began)
        self.trained[session.policy_id, session.number] = policy
        return session

    @rule(session=sessions, value=VALUES, step=st.integers(0, 2), close=st.booleans())
    def write_through(self, session, value, step, close):
        if session is None:
            return
        policy = self.trained[session.policy_id, session.number]
        there = self.policies.get(session.policy) is policy  # not deleted
        current = there and policy.session == session.number and policy.owner is not None
        if close:
            if not current:
                self.refused(self.catalog.close_session, session)
                return
            self.catalog.close_session(session)
            policy.owner = policy.began = None
        elif not current or policy.retired:
            self.refused(self.catalog.export, session.policy, packed(value), step, session=session)
        else:
            made = self.catalog.export(session.policy, packed(value), step, session=session)
            assert made.number == self.add(session.policy, value, step)

    @rule(
        name=st.sampled_from(NAMES),
        number=st.integers(0, 4),
        changes=st.dictionaries(
            st.sampled_from(["team", "use"]), st.sampled_from([None, "a", "b"]), min_size=1
        ),
    )
    def tag(self, name, number, changes):
        policy, named = self.policies.get(name), f"{name}@{number}" if number else name
        if policy is None or (number and number not in policy.revisions):
            self.refused(self.catalog.tag, named, changes)
            return
        for key, value in changes.items():
            policy.tags.pop((number, key), None)
            if value is not None:
                policy.tags[number, key] = value
        found = {key: value for (of, key), value in policy.tags.items() if of == number}
        assert self.catalog.tag(named, changes) == found

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name):
        policy = self.policies.get(name)
        leased = {lease.digest for lease in self.leases}
        if (
            policy is None
            or not policy.retired
            or policy.owner is not None
            or leased & {revision.digest for revision in policy.revisions.values()}
        ):
            self.refused(self.catalog.delete, name)
            return
        self.catalog.delete(name)
        del self.policies[name]

    @rule(seconds=st.sampled_from([-5000.0, 5000.0]))
    def pass_time(self, seconds):
        self.clock.now += seconds

    @rule(compact=st.booleans())
    def collect(self, compact):
        leased = {lease.digest for lease in self.leases}
        expected = []
        for name, policy in self.policies.items():
            newer = 0
            for number, revision in sorted(policy.revisions.items(), reverse=True):
                beyond = revision.retired or (
                    policy.keep_last is not None and newer >= policy.keep_last
                )
                newer += not revision.retired
                named = number in [stack[-1] for stack in policy.stacks.values()]
                used = revision.digest in leased or number == policy.began
                if beyond and not (revision.pinned or named or used):
                    expected.append((name, number))
        told = self.catalog.gc(dry_run=True, compact=False)
        done = self.catalog.gc(compact=compact)
        assert sorted(done.revisions) == sorted(f"{name}@{number}" for name, number in expected)
        foretold = (told.revisions, told.payloads, told.packs)
        assert foretold == (done.revisions, done.payloads, done.packs)
        for name, number in expected:
            policy = self.policies[name]
            del policy.revisions[number]
            policy.tags = {key: value for key, value in policy.tags.items() if key[0] != number}
        named = (r.digest for policy in self.policies.values() for r in policy.revisions.values())
        assert self.catalog.stats()["payloads"] == len(leased.union(named))

    @invariant()
    def names_are_the_models(self):
        assert {record.policy for record in self.catalog.policies()} == set(self.policies)
        for name, policy in self.policies.items():
            found = {revision.number: revision for revision in self.catalog.revisions(name)}
            assert {n: (r.digest, r.step, r.pinned, r.state) for n, r in found.items()} == {
                n: (r.digest, r.step, r.pinned, "retired" if r.retired else "live")
                for n, r in policy.revisions.items()
            }
            for number in [0, *policy.revisions]:
                expected = {key: value for (of, key), value in policy.tags.items() if of == number}
                assert self.catalog.tags(f"{name}@{number}" if number else name) == expected
            assert {a.name: a.number for a in self.catalog.aliases(name)} == {
                alias: s[-1] for alias, s in policy.stacks.items()
            }
            for alias, stack in policy.stacks.items():
                if policy.retired:
                    with pytest.raises(UserError, match="is retired"):
                        self.catalog.resolve(f"{name}@{alias}")
                else:
                    # an alias never names what is gone or retired
                    digest = policy.revisions[stack[-1]].digest
                    assert self.catalog.resolve(f"{name}@{alias}").digest == digest


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def test_the_catalog_is_its_model(request, tmp_path, database):
    class Here(Machine):
        place = (
            "" if database == "sqlite" else request.getfixturevalue("postgres_server").catalog_url
        )
        folder = str(tmp_path / "catalog")

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    few = settings(
        max_examples=8,
        stateful_step_count=30,
        phases=[Phase.generate],  # shrinking replays thousands of steps; thirty read well enough
        suppress_health_check=checks,
    )
    run_state_machine_as_test(Here, settings=few)
