"""Futures against a model of them: dictionaries that hold the expected answer of every call.

Hypothesis makes sequences of calls; after each, every id that was given out must have the model's
outcome. A crash is a copy of the files while the database is open.
"""

import asyncio
import collections
import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mint_jax.service.futures import (
    KEEP_S,
    Category,
    Conflict,
    Futures,
    Gone,
    Outcome,
    TrainingRequest,
)
from mint_jax.service.server_db import ServerDatabase
from tests.residency.clock import Clock

MODELS = st.sampled_from(("a", "b"))
SEQ_IDS = st.integers(1, 5)
BODIES = (b"short", b"long", b"fails")
CALL = "forward_backward"


def outcome_of(model, seq_id, body):
    """Returns a short result, a long one, or a failure."""
    text = f"{model} {seq_id}"
    if body == b"fails":
        return Outcome(text.encode(), Category.USER)
    return Outcome(text.encode() * (30_000 if body == b"long" else 1))


@dataclasses.dataclass
class Known:
    """A request that was accepted."""

    id: str
    body: bytes
    ended: bool = False
    released: bool = False
    delivered_at: float | None = None


@dataclasses.dataclass
class Policy:
    """A model; ``state`` holds the numbers of the requests that it was changed by, ``saved`` those
    of its snapshot.
    """

    requests: dict[int, Known] = dataclasses.field(default_factory=dict)
    state: list[int] = dataclasses.field(default_factory=list)
    saved: list[int] = dataclasses.field(default_factory=list)
    place: int = 0
    taken: list[TrainingRequest] = dataclasses.field(default_factory=list)

    def settled(self, seq_id: int) -> bool:
        known = self.requests[seq_id]
        return known.released and (known.body == b"fails" or seq_id in self.saved)

    def next(self) -> int | None:
        """Returns the number that must be ready, if any."""
        done = {*self.state, *(request.seq_id for request in self.taken)}
        done |= {n for n, known in self.requests.items() if known.ended and known.body == b"fails"}
        following = next(n for n in itertools.count(1) if n not in done)
        return following if following in self.requests else None


class Machine(RuleBasedStateMachine):
    """``folder`` is set by the test."""

    folder = Path()

    def __init__(self):
        super().__init__()
        self.clock, self.policies, self.opened = Clock(), {}, 0
        self.dropped: list[str] = []
        shutil.rmtree(self.folder, ignore_errors=True)
        self.futures = self.open()

    def open(self) -> Futures:
        places = {name: policy.place for name, policy in self.policies.items() if policy.place}
        self.database = ServerDatabase(self.place() / "server.db")
        self.ready: collections.deque[TrainingRequest] = collections.deque()
        return Futures(self.database, places, self.ready.append, clock=self.clock)

    def place(self) -> Path:
        return self.folder / str(self.opened)

    def sync(self):
        self.database.write(lambda connection: None).result()

    def teardown(self):
        self.database.close()

    @rule(
        model=MODELS,
        seq_id=SEQ_IDS,
        body=st.sampled_from(BODIES),
        call=st.sampled_from((CALL, "optim_step")),
    )
    def submit(self, model, seq_id, body, call=CALL):
        policy = self.policies.get(model)
        known = None if policy is None else policy.requests.get(seq_id)
        if known is None:
            id = self.futures.submit(model, seq_id, CALL, body).result()
            self.policies.setdefault(model, Policy()).requests[seq_id] = Known(id, body)
        elif policy.settled(seq_id):
            with pytest.raises(Gone, match=f"request {seq_id} of '{model}' has run"):
                self.futures.submit(model, seq_id, call, body).result()
        elif body != known.body or call != CALL:
            with pytest.raises(Conflict, match=f"request {seq_id} of '{model}'"):
                self.futures.submit(model, seq_id, call, body).result()
        else:
            assert self.futures.submit(model, seq_id, call, body).result() == known.id

    @rule()
    def take(self):
        following = {name: policy.next() for name, policy in self.policies.items()}
        while self.ready and self.futures.body(self.ready[0]) is None:
            assert self.ready.popleft().id in self.dropped
        if not self.ready:
            assert not any(following.values())
            return
        request = self.ready.popleft()
        policy = self.policies[request.model]
        known = policy.requests[request.seq_id]
        assert following[request.model] == request.seq_id
        assert (request.id, request.is_again) == (known.id, known.ended)
        assert self.futures.body(request) == known.body
        policy.taken.append(request)

    @rule(
        model=MODELS, bodies=st.lists(st.sampled_from(BODIES), max_size=3), backwards=st.booleans()
    )
    def train(self, model, bodies, backwards):
        """Some of a model's next requests, and whatever else waits, to their ends."""
        first = len(self.policies[model].requests) + 1 if model in self.policies else 1
        numbered = list(enumerate(bodies, first))
        for seq_id, body in reversed(numbered) if backwards else numbered:
            self.submit(model, seq_id, body)
        while any(policy.taken or policy.next() for policy in self.policies.values()):
            self.take()
            for name in self.policies:
                self.finish(name)

    @rule(model=MODELS, also=st.booleans())
    def release_all(self, model, also):
        """With a snapshot, everything that has ended is settled."""
        for seq_id in self.policies[model].requests if model in self.policies else ():
            self.deliver(model, seq_id)
        self.time_passes(KEEP_S)
        if also:
            self.snapshot(model)

    @rule(model=MODELS)
    def finish(self, model):
        policy = self.policies.get(model)
        if policy is None or not policy.taken:
            return
        request = policy.taken.pop(0)
        seq_id = request.seq_id
        known = policy.requests[seq_id]
        outcome = outcome_of(model, seq_id, known.body)
        self.futures.finish(request, Outcome(b"another") if known.ended else outcome)
        if not known.ended:
            assert asyncio.run(self.futures.wait(known.id, 30)) == outcome
        known.ended = True
        if known.body != b"fails":
            policy.state.append(seq_id)

    @rule(model=MODELS, seq_id=SEQ_IDS)
    def deliver(self, model, seq_id):
        if model in self.policies and seq_id in self.policies[model].requests:
            known = self.policies[model].requests[seq_id]
            if known.ended:
                self.futures.delivered(known.id)
                known.delivered_at = self.clock.now

    @rule(seconds=st.sampled_from((1.0, KEEP_S / 2, KEEP_S)))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        self.futures.expire()
        self.sync()
        for policy in self.policies.values():
            for known in policy.requests.values():
                if known.delivered_at is not None and known.delivered_at + KEEP_S <= self.clock.now:
                    known.released = True

    @rule(model=MODELS)
    def snapshot(self, model):
        if (policy := self.policies.get(model)) is not None:
            place = self.futures.place(model)
            assert place >= policy.place
            policy.place, policy.saved = place, list(policy.state)
            self.futures.snapshot(model, place)

    @rule(model=MODELS)
    def forget(self, model):
        self.futures.forget(model)
        self.sync()
        if model in self.policies:
            self.dropped += [known.id for known in self.policies.pop(model).requests.values()]

    @rule(crash=st.booleans())
    def reopen(self, crash):
        """Marks of deliveries wait for no sync, so a crash may lose the last; here they have been
        synced.
        """
        self.sync()
        before, old = self.database, self.place()
        if crash:
            self.opened += 1
            shutil.copytree(old, self.place())
        else:
            before.close()
        self.futures = self.open()
        before.close()
        for policy in self.policies.values():
            policy.state, policy.taken = list(policy.saved), []
            for known in policy.requests.values():  # results are kept for as long again
                if known.delivered_at is not None:
                    known.delivered_at = self.clock.now

    @invariant()
    def every_id_has_its_outcome(self):
        gone = self.dropped[-3:]
        for name, policy in self.policies.items():
            for seq_id, known in policy.requests.items():
                if known.released:
                    gone.append(known.id)
                else:
                    outcome = outcome_of(name, seq_id, known.body) if known.ended else None
                    assert self.futures.outcome(known.id) == outcome
        for id in gone:
            with pytest.raises(Gone):
                self.futures.outcome(id)


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        (80, 40),
        pytest.param(200, 60, marks=pytest.mark.long),
        pytest.param(5_000, 100, marks=pytest.mark.slow),
    ],
)
def test_futures_are_what_their_model_says(memory, examples, steps):
    class Here(Machine):
        folder = memory / "server"

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=(Phase.generate,),  # shrinking replays thousands of steps
            suppress_health_check=list(HealthCheck),
        ),
    )
