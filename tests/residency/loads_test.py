"""The queue of cold loads: order, joins, bounds, ETA, cancelling; with workers that tests hold at a
gate.
"""

import threading

import pytest

from mint_jax.residency.loads import COLD, PREFETCH, WARM, ColdLoads, QueueFull
from mint_jax.residency.quotas import ResidencyQuota, ResidencyQuotas
from tests.residency.clock import Clock

LONG = 30.0  # a deadlock fails, it does not hang


class Held:
    """A queue whose worker does nothing until ``let``; it notes the order of work."""

    def __init__(self, workers=1, **settings):
        self.clock, self.order, self.gate, self.at_work = (
            Clock(),
            [],
            threading.Semaphore(0),
            threading.Semaphore(0),
        )
        self.queue = ColdLoads(self._work, workers, clock=self.clock, **settings)

    def _work(self, load):
        self.at_work.release()
        assert self.gate.acquire(timeout=LONG)
        self.order.append(load.digest)
        self.queue.finish(load)

    def wait_at_work(self):
        assert self.at_work.acquire(timeout=LONG)

    def let(self, n: int):
        self.gate.release(n)

    def drain(self, n: int) -> list[str]:
        self.let(n)
        while len(self.order) < n:
            threading.Event().wait(0.001)
        return self.order


@pytest.fixture
def held():
    made = []

    def make(**settings) -> Held:
        made.append(Held(**settings))
        return made[-1]

    yield make
    for one in made:
        one.let(1000)
        one.queue.close()


def test_order_is_priority_then_arrival_and_a_request_raises_a_prefetch(held):
    one = held(depth=100)
    one.queue.submit("running", "a")
    one.wait_at_work()
    for digest, priority in [
        ("p1", PREFETCH),
        ("p2", PREFETCH),
        ("c1", COLD),
        ("w", WARM),
        ("c2", COLD),
    ]:
        one.queue.submit(digest, "a", priority)
    load, _ = one.queue.submit("p2", "b", COLD)
    assert load.tenant == "a"
    assert one.drain(6) == ["running", "w", "p2", "c1", "c2", "p1"]
    assert len(one.queue) == 0


def test_the_same_revision_is_one_load(held):
    one = held()
    first, _ = one.queue.submit("x", "a")
    one.wait_at_work()
    again, _ = one.queue.submit("x", "b")
    assert again is first
    assert one.drain(1) == ["x"]
    third, _ = one.queue.submit("x", "a")
    assert third is not first


def test_distinct_revisions_are_worked_on_at_the_same_time(held):
    one = held(workers=4)
    for i in range(4):
        one.queue.submit(f"d{i}", "a")
    for _ in range(4):
        one.wait_at_work()  # all four are inside at once
    assert sorted(one.drain(4)) == ["d0", "d1", "d2", "d3"]


def test_a_full_queue_drops_the_newest_waiting_prefetch_then_refuses_with_a_time(held):
    one = held(depth=4, bytes_per_s=10.0, size_of=lambda digest: 40)
    one.queue.submit("running", "a", PREFETCH)
    one.wait_at_work()
    for digest, priority in [("p1", PREFETCH), ("p2", PREFETCH), ("c1", COLD)]:
        one.queue.submit(digest, "a", priority)
    with pytest.raises(QueueFull):
        one.queue.submit("p3", "a", PREFETCH)
    assert [one.queue.submit(d, "a")[1].digest for d in ("c2", "c3")] == ["p2", "p1"]
    with pytest.raises(QueueFull, match="4 loads are unfinished") as refused:
        one.queue.submit("c4", "a")
    assert refused.value.reason == "queue_full"
    assert refused.value.retry_after_s == pytest.approx(8.0)  # half of 4 loads of 4 s
    one.clock.advance(3.0)
    with pytest.raises(QueueFull) as refused:
        one.queue.submit("c4", "a")
    assert refused.value.retry_after_s == pytest.approx(6.5)
    one.queue.submit("c3", "a")  # joining is always possible
    assert one.drain(4) == ["running", "c1", "c2", "c3"]


def test_a_tenant_has_its_own_bound(held):
    one = held(quotas=ResidencyQuotas(named={"small": ResidencyQuota(loads=1)}))
    one.queue.submit("x", "small")
    one.wait_at_work()
    with pytest.raises(QueueFull, match="'small' has 1 unfinished") as refused:
        one.queue.submit("y", "small")
    assert refused.value.reason == "tenant_quota"
    one.queue.submit("y", "other")
    one.queue.submit("y", "small")
    assert one.drain(2) == ["x", "y"]


def test_the_eta_is_bytes_ahead_and_own_at_the_measured_rate(held):
    sizes = {"r": 100, "a": 40, "b": 60}
    one = held(bytes_per_s=10.0, size_of=sizes.get)
    loads = {"r": one.queue.submit("r", "t")[0]}
    one.wait_at_work()
    loads |= {d: one.queue.submit(d, "t")[0] for d in "ab"}
    assert [one.queue.eta(loads[d]) for d in "rab"] == pytest.approx([10.0, 14.0, 20.0])
    one.clock.advance(4.0)
    assert [one.queue.eta(loads[d]) for d in "rab"] == pytest.approx([6.0, 10.0, 16.0])
    assert one.queue.eta_of_new("unknown") == pytest.approx(16.0), (
        "no bytes known, no load measured"
    )
    loads["r"].cold, loads["r"].seconds = True, 2.0  # 50 bytes a second
    one.drain(1)
    assert one.queue.bytes_per_s == 50.0
    one.wait_at_work()
    assert one.queue.eta_of_new("unknown") == pytest.approx((40 + 60 + 100) / 50), (
        "as large as loads were so far"
    )


def test_two_workers_halve_the_wait(held):
    one = held(workers=2, bytes_per_s=10.0, size_of=lambda digest: 100)
    for d in "xy":
        one.queue.submit(d, "t")
        one.wait_at_work()
    assert one.queue.eta(one.queue.submit("z", "t")[0]) == pytest.approx(20.0)


def test_only_a_load_that_has_not_begun_is_withdrawn(held):
    one = held()
    running, _ = one.queue.submit("x", "a")
    one.wait_at_work()
    waiting, _ = one.queue.submit("y", "a")
    assert not one.queue.withdraw(running)
    assert one.queue.withdraw(waiting)
    assert not one.queue.withdraw(waiting)
    again, _ = one.queue.submit("y", "a")
    assert again is not waiting
    assert one.drain(2) == ["x", "y"]


def test_a_closed_queue_takes_nothing_and_tells_what_was_left():
    one = Held()
    one.queue.submit("x", "a")
    one.wait_at_work()
    left, _ = one.queue.submit("y", "a")
    one.let(1)
    closer = threading.Thread(target=lambda: one.order.append(one.queue.close()))
    one.queue._closed = True  # before the worker comes for more
    closer.start()
    closer.join(LONG)
    assert one.order == ["x", [left]]
    with pytest.raises(RuntimeError, match="closed"):
        one.queue.submit("z", "a")
