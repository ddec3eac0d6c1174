"""The queue of cold loads: order, joins and bounds; with workers that tests hold at a gate."""

import threading

import pytest

from mint_jax.residency.loads import COLD, PREFETCH, WARM, ColdLoads, QueueFull
from tests.residency.clock import Clock

LONG = 30.0  # a deadlock fails, it does not hang


class Gated:
    """A queue whose worker does nothing until ``let``; it notes the order of work."""

    def __init__(self, workers=1, **settings):
        self.order, self.gate, self.at_work = [], threading.Semaphore(0), threading.Semaphore(0)
        self.queue = ColdLoads(self._work, workers, clock=Clock(), **settings)

    def _work(self, load):
        self.at_work.release()
        assert self.gate.acquire(timeout=LONG)
        self.order.append(load.digest)
        self.queue.finish(load)

    def submit(self, *digests, priority=COLD):
        return [self.queue.submit(digest, "a", priority) for digest in digests]

    def wait_at_work(self):
        assert self.at_work.acquire(timeout=LONG)

    def drain(self, n: int) -> list[str]:
        self.gate.release(n)
        while len(self.order) < n:
            threading.Event().wait(0.001)
        return self.order


@pytest.fixture
def gated():
    made = []

    def make(**settings) -> Gated:
        made.append(Gated(**settings))
        return made[-1]

    yield make
    for one in made:
        one.gate.release(1000)
        one.queue.close()


def test_order_is_priority_then_arrival_and_a_request_raises_a_prefetch(gated):
    one = gated()
    [(running, _)] = one.submit("running")
    one.wait_at_work()
    one.submit("p1", "p2", priority=PREFETCH)
    one.submit("c1")
    one.submit("w", priority=WARM)
    [(again, _), _] = one.submit("running", "c2")
    assert again is running, "one revision is one load"
    one.submit("p2")
    assert one.drain(6) == ["running", "w", "p2", "c1", "c2", "p1"]
    assert len(one.queue) == 0
    assert one.submit("running")[0][0] is not running


def test_a_full_queue_drops_the_newest_waiting_prefetch_then_refuses_with_a_time(gated):
    one = gated(depth=4)
    [(measured, _)] = one.submit("measured")
    measured.cold, measured.seconds = True, 4.0
    one.drain(1)
    one.submit("running", priority=PREFETCH)
    for _ in range(2):
        one.wait_at_work()
    one.submit("p1", "p2", priority=PREFETCH)
    one.submit("c1")
    with pytest.raises(QueueFull):
        one.submit("p3", priority=PREFETCH)
    assert [dropped.digest for _, dropped in one.submit("c2", "c3")] == ["p2", "p1"]
    with pytest.raises(QueueFull, match="4 loads are unfinished") as refused:
        one.submit("c4")
    assert refused.value.retry_after_s == pytest.approx(8.0)  # half of 4 loads of 4 s
    one.submit("c3")  # joining is always possible
    assert one.drain(5) == ["measured", "running", "c1", "c2", "c3"]
