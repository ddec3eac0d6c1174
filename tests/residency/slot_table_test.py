"""The table of slots: who gets one, who goes, who waits; against a model."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mint_jax.errors import UserError
from mint_jax.residency.quotas import ResidencyQuota, ResidencyQuotas
from mint_jax.residency.slot_table import SlotTable
from tests.residency.clock import Clock

SIZES = {1: 1, 8: 8}


def make(capacities, quotas=None, gone=None, clock=None) -> SlotTable:
    return SlotTable(
        capacities, SIZES, quotas, 10.0, clock or Clock(), None if gone is None else gone.append
    )


def fill(table, bucket, digest, tenant="a", seconds=1.0):
    slot = table.reserve(bucket, digest, tenant)
    if slot is not None:
        table.fill(digest, seconds, modules=3)
    return slot


def test_a_slot_is_leased_only_when_filled():
    table = make({1: 1, 8: 2})
    slot = table.reserve(8, "x", "a")
    assert slot.bucket == 8
    assert table.lease("x") is None
    assert table.find("x") is None
    table.fill("x", 1.0, 5)
    assert table.lease("x") == table.find("x") == slot
    assert table.modules("x") == 5
    assert table.nbytes == 8
    assert table.state()[8] == {
        "slots": 2,
        "free": 1,
        "filling": 0,
        "leased": 1,
        "leases": 1,
        "pinned": 0,
    }


def test_of_those_nobody_uses_the_one_of_the_lowest_score_goes():
    clock, gone = Clock(), []
    table = make({1: 3}, gone=gone, clock=clock)
    for name, seconds in (("x", 3.0), ("y", 1.25), ("z", 2.0)):
        fill(table, 1, name, seconds=seconds)
    table.lease("y")
    fill(table, 1, "n", seconds=1.5)
    assert gone == ["z"]
    table.release("y")  # 2 x 1.25 s above the 2 s of z, and n is 1.5 s above them
    fill(table, 1, "m")
    assert gone == ["z", "x"]
    clock.advance(30)
    table.lease("n")
    table.release("n")
    fill(table, 1, "o")  # beside m, 1 s above the 3 s of x
    assert gone == ["z", "x", "m"]


def test_leases_pins_and_fillings_stay_and_without_eviction_nobody_goes():
    table = make({1: 3})
    fill(table, 1, "leased")
    fill(table, 1, "pinned")
    table.lease("leased")
    table.pin("pinned")
    table.reserve(1, "filling", "a")
    assert table.reserve(1, "n", "a") is None
    assert not table.drop("filling"), "its load is under way"
    table.fill("filling", 1.0)
    assert table.reserve(1, "n", "a", evict=False) is None
    assert table.reserve(1, "n", "a") is not None
    table.abandon("n")
    assert table.reserve(1, "m", "a", evict=False) is not None


def test_a_quota_of_slots_takes_only_the_tenants_own_in_any_bucket():
    gone = []
    table = make({1: 2, 8: 2}, ResidencyQuotas(named={"t": ResidencyQuota(slots=2)}), gone)
    fill(table, 1, "other", "big", seconds=1e-3)
    fill(table, 1, "x", "t")
    fill(table, 8, "y", "t", seconds=9.0)
    table.lease("y")
    assert fill(table, 8, "z", "t"), "x of the other bucket leaves a slot"
    assert gone == ["x"]
    table.lease("z")
    assert table.reserve(1, "n", "t") is None, "both are in use"
    assert fill(table, 8, "w", "big") is None
    table.release("z")
    assert fill(table, 1, "n", "t").bucket == 1
    assert gone == ["x", "z"]
    table.lease("n")
    table.release("y")
    fill(table, 1, "p", "big")
    assert gone == ["x", "z", "other"]
    fill(table, 1, "q", "t")  # its own y for the quota, and p for the slot
    assert gone == ["x", "z", "other", "y", "p"]


@pytest.mark.parametrize(
    ("bucket", "tenant", "message"),
    [
        (64, "a", "slots for 1, 8"),
        (1, "none", "quota of 0"),
        (8, "a", "all 1 slots of rank bucket 8 are pinned"),
    ],
)
def test_what_can_never_have_a_slot_is_refused(bucket, tenant, message):
    table = make({1: 1, 8: 1}, ResidencyQuotas(named={"none": ResidencyQuota(slots=0)}))
    fill(table, 8, "x")
    table.pin("x")
    with pytest.raises(UserError, match=message):
        table.reserve(bucket, "n", tenant)


def test_a_dropped_slot_is_cleared_when_its_last_lease_ends():
    table = make({1: 1})
    fill(table, 1, "x")
    table.pin("x")
    table.lease("x")
    table.lease("x")
    assert not table.drop("x")
    assert not table.release("x")
    assert table.find("x") is not None
    assert table.release("x")
    assert table.find("x") is None
    assert table.nbytes == 0
    with pytest.raises(KeyError):
        table.release("x")


class Against(RuleBasedStateMachine):
    """Random use against a plain model."""

    @initialize(one=st.integers(1, 3), eight=st.integers(1, 3), quota=st.integers(1, 4))
    def start(self, one, eight, quota):
        self.capacities, self.clock, self.evicted, self.quota = (
            {1: one, 8: eight},
            Clock(),
            [],
            quota,
        )
        self.table = make(
            self.capacities,
            ResidencyQuotas(named={"t1": ResidencyQuota(slots=quota)}),
            self.evicted,
            self.clock,
        )
        self.here: dict[str, dict] = {}
        self.pinned: set[str] = set()

    def idle(self, d) -> bool:
        return not (self.here[d]["filling"] or self.here[d]["leases"] or d in self.pinned)

    @rule(
        name=st.integers(0, 9), bucket=st.sampled_from([1, 8]), tenant=st.sampled_from(["t0", "t1"])
    )
    def reserve(self, name, bucket, tenant):
        digest = f"d{name}"
        if digest in self.here:
            return
        inside = [d for d in self.here if self.here[d]["slot"].bucket == bucket]
        if sum(d in self.pinned for d in inside) == self.capacities[bucket]:
            with pytest.raises(UserError, match="pinned"):
                self.table.reserve(bucket, digest, tenant)
            return
        idle = {d for d in self.here if self.idle(d)}
        own = {d for d in self.here if self.here[d]["tenant"] == tenant}
        over = tenant == "t1" and len(own) >= self.quota
        free = len(inside) < self.capacities[bucket] or idle & set(inside)
        possible = bool(free) and (not over or bool(own & idle))
        slot = self.table.reserve(bucket, digest, tenant)
        assert (slot is not None) == possible
        gone, self.evicted[:] = list(self.evicted), []
        assert len(gone) <= (2 if over else 1)
        assert bool(slot) or not gone
        for victim in gone:
            assert victim in idle
            del self.here[victim]
        if slot is not None:
            assert slot.bucket == bucket
            self.here[digest] = {"slot": slot, "tenant": tenant, "filling": True, "leases": 0}

    @rule(name=st.integers(0, 9), seconds=st.floats(0, 5), good=st.booleans())
    def end_filling(self, name, seconds, good):
        digest = f"d{name}"
        if digest in self.here and self.here[digest]["filling"]:
            if good:
                self.table.fill(digest, seconds)
                self.here[digest]["filling"] = False
            else:
                self.table.abandon(digest)
                del self.here[digest]

    @rule(name=st.integers(0, 9))
    def lease(self, name):
        digest = f"d{name}"
        slot = self.table.lease(digest)
        mine = self.here.get(digest)
        assert slot == (mine["slot"] if mine and not mine["filling"] else None)
        if slot is not None:
            mine["leases"] += 1

    @rule(name=st.integers(0, 9))
    def release(self, name):
        mine = self.here.get(digest := f"d{name}")
        if mine and mine["leases"]:
            mine["leases"] -= 1
            assert self.table.release(digest) == (mine["leases"] == 0)

    @rule(name=st.integers(0, 9), on=st.booleans())
    def pin(self, name, on):
        digest = f"d{name}"
        (self.table.pin if on else self.table.unpin)(digest)
        (self.pinned.add if on else self.pinned.discard)(digest)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def books_balance(self):
        slots = [mine["slot"] for mine in self.here.values()]
        assert len(set(slots)) == len(slots), "two revisions in one slot"
        assert sum(mine["tenant"] == "t1" for mine in self.here.values()) <= self.quota
        for bucket, capacity in self.capacities.items():
            inside = [mine for mine in self.here.values() if mine["slot"].bucket == bucket]
            assert all(0 <= mine["slot"].index < capacity for mine in inside)
            state = self.table.state()[bucket]
            assert state["free"] == capacity - len(inside)
            assert state["leases"] == sum(mine["leases"] for mine in inside)
        assert set(self.table.resident()) == {
            d for d, mine in self.here.items() if not mine["filling"]
        }
        assert self.table.nbytes == sum(SIZES[slot.bucket] for slot in slots)


Against.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstAModel = Against.TestCase
