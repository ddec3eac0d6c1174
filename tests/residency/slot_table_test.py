"""The table of slots: reservations, leases and evictions, against a model."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mint_jax.errors import UserError
from mint_jax.residency.slot_table import SlotTable
from tests.residency.clock import Clock

SIZES = {1: 1, 8: 8}


def test_the_lowest_score_among_idle_slots_is_evicted():
    clock, evicted = Clock(), []
    table = SlotTable({1: 3}, SIZES, 10.0, clock, evicted.append)

    def fill(digest, seconds=1.0):
        assert table.reserve(1, digest)
        table.fill(digest, seconds, modules=5)

    for name, seconds in (("x", 3.0), ("y", 1.25), ("z", 2.0)):
        fill(name, seconds)
    assert table.modules("x") == 5
    table.lease("y")
    assert table.reserve(1, "n", evict=False) is None
    fill("n", 1.5)
    assert evicted == ["z"]
    table.release("y")  # 2 x 1.25 s above the 2 s of z, and n is 1.5 s above them
    fill("m")
    assert evicted == ["z", "x"]
    clock.advance(30)
    table.lease("n")
    table.release("n")
    fill("o")  # m is 1 s above the 3 s of x
    assert evicted == ["z", "x", "m"]
    with pytest.raises(UserError, match="slots for 1: configure slots for this bucket"):
        table.reserve(64, "p")


class Against(RuleBasedStateMachine):
    """Random use against a plain model."""

    @initialize(one=st.integers(1, 3), eight=st.integers(1, 3))
    def start(self, one, eight):
        self.capacities, self.clock, self.evicted = {1: one, 8: eight}, Clock(), []
        self.table = SlotTable(self.capacities, SIZES, 10.0, self.clock, self.evicted.append)
        self.occupants: dict[str, dict] = {}

    @rule(name=st.integers(0, 9), bucket=st.sampled_from([1, 8]))
    def reserve(self, name, bucket):
        digest = f"d{name}"
        if digest in self.occupants:
            return
        inside = {d: o for d, o in self.occupants.items() if o["slot"].bucket == bucket}
        idle = {d for d, o in inside.items() if not (o["filling"] or o["leases"])}
        full = len(inside) == self.capacities[bucket]
        slot = self.table.reserve(bucket, digest)
        assert (slot is not None) == (not full or bool(idle))
        assert len(self.evicted) == (full and slot is not None)
        assert set(self.evicted) <= idle
        for victim in self.evicted:
            del self.occupants[victim]
        self.evicted.clear()
        if slot is not None:
            assert slot.bucket == bucket
            self.occupants[digest] = {"slot": slot, "filling": True, "leases": 0, "doomed": False}

    @rule(name=st.integers(0, 9), seconds=st.floats(0, 5), good=st.booleans())
    def end_filling(self, name, seconds, good):
        digest = f"d{name}"
        if digest in self.occupants and self.occupants[digest]["filling"]:
            if good:
                self.table.fill(digest, seconds)
                self.occupants[digest]["filling"] = False
            else:
                self.table.abandon(digest)
                del self.occupants[digest]

    @rule(name=st.integers(0, 9))
    def lease(self, name):
        digest = f"d{name}"
        slot = self.table.lease(digest)
        own = self.occupants.get(digest)
        assert slot == (own["slot"] if own and not own["filling"] else None)
        if slot is not None:
            own |= {"leases": own["leases"] + 1, "doomed": False}

    @rule(name=st.integers(0, 9))
    def release(self, name):
        digest = f"d{name}"
        own = self.occupants.get(digest)
        if own and own["leases"]:
            own["leases"] -= 1
            assert self.table.release(digest) == (own["leases"] == 0)
            if own["doomed"] and not own["leases"]:
                del self.occupants[digest]

    @rule(name=st.integers(0, 9))
    def drop(self, name):
        digest = f"d{name}"
        own = self.occupants.get(digest)
        assert self.table.drop(digest) == (own is None or not (own["filling"] or own["leases"]))
        if own and own["leases"]:
            own["doomed"] = True
        elif own and not own["filling"]:
            del self.occupants[digest]

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def counts_agree(self):
        slots = [own["slot"] for own in self.occupants.values()]
        assert len(set(slots)) == len(slots), "two revisions in one slot"
        for bucket, capacity in self.capacities.items():
            inside = [own for own in self.occupants.values() if own["slot"].bucket == bucket]
            assert all(0 <= own["slot"].index < capacity for own in inside)
            state = self.table.state()[bucket]
            assert state["free"] == capacity - len(inside)
            assert state["leases"] == sum(own["leases"] for own in inside)
        resident = {d for d, own in self.occupants.items() if not own["filling"]}
        assert set(self.table.resident()) == resident
        assert {d for d in self.occupants if self.table.find(d) is not None} == resident
        assert self.table.nbytes == sum(SIZES[slot.bucket] for slot in slots)


Against.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestAgainstAModel = Against.TestCase
