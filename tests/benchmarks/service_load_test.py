"""Growth of a server's memory under load: what caches take is no growth, nor what is freed
later.
"""

from benchmarks.service_load import growth


def read(rss, caches=lambda at: 0):
    return [(float(at), int(rss(at)), int(caches(at))) for at in range(181)]


def test_steady_growth_is_seen_and_a_warm_up_is_not():
    # 5 a second over the sixty seconds of a third
    assert growth(read(lambda at: 1000 + 5 * at)) == (300, 0)
    assert growth(read(lambda at: 1000 + 10 * min(at, 60))) == (0, 0)


def test_memory_that_is_given_back_now_and_then_has_not_grown():
    assert growth(read(lambda at: 1000 + 7 * (at % 50))) == (0, 0)
    assert growth(read(lambda at: 1000 + at + 7 * (at % 30)))[0] == 60


def test_caches_may_grow():
    assert growth(read(lambda at: 1000 + 5 * at, lambda at: 5 * at)) == (0, 300)
    assert growth(read(lambda at: 1000 + 5 * at, lambda at: 4 * at)) == (60, 240)
    # what they let go hides nothing
    assert growth(read(lambda at: 1000 + 5 * at, lambda at: 900 - at)) == (300, -60)


def test_a_load_that_was_read_once_has_no_growth():
    assert growth([(0.0, 1000, 0)]) == (0, 0)
