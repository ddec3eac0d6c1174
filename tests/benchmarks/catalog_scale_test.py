"""What the bench says of resolutions where the machine left none of them undisturbed."""

from benchmarks import catalog_scale


def test_the_largest_is_of_the_kinds_that_have_it():
    """The kernel took the core in every resolution of a kind: there is no percentile of the
    others.
    """
    small, large = ({"median": x, "interval": [x, x], "n": 3} for x in (0.1, 0.2))
    resolved = {"zipf": {"p99_ms": small, "p99_undisturbed_ms": small}, "bursts": {"p99_ms": large}}
    assert catalog_scale._largest(resolved, "p99_ms") == large
    assert catalog_scale._largest(resolved, "p99_undisturbed_ms") == small
    assert catalog_scale._largest({"zipf": {}}, "p99_undisturbed_ms") is None
