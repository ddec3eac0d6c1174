"""The peer gets, for each work, the options that make it fastest, and what was tried is told."""

import pytest

from benchmarks import peft_peer
from benchmarks.peft_peer import ATTENTION, CACHES, THREADS, Options, Work


@pytest.fixture
def tries(monkeypatch):
    """``tries(compiled)``: the search over made-up times, of which compiling gives ``compiled``."""
    cost = {
        "updates": {"sdpa": 2.0, "eager": 1.0},
        "generate": {"sdpa": 3.0, "eager": 4.0, "dynamic": 0.5, "static": 0.1},
    }

    def seconds(peer, options, work):
        of = cost[work.method]
        return of[options.attention] + 0.01 * options.threads + of.get(options.cache, 0.0)

    def search(compiled, compile_s=1.0):
        monkeypatch.setattr(peft_peer, "_seconds", seconds)
        monkeypatch.setattr(
            peft_peer,
            "compiled_seconds",
            lambda made, wanted, limit_s: {name: compiled[name] for name in wanted},
        )
        works = {"train": Work("updates", ()), "sample": Work("generate", ())}
        return peft_peer.fastest(None, (), works, compile_s)  # type: ignore[arg-type]

    return search


def test_each_work_has_its_own_best(tries):
    best, tried = tries({"train": "not compiled in 1 s", "sample": 9.0})
    assert best == {
        "train": Options("eager", min(THREADS), CACHES[0]),
        "sample": Options("sdpa", min(THREADS), "static"),
    }
    # each choice once, and what compiling gave
    assert len(tried["train"]) == len(ATTENTION) + len(THREADS)
    assert tried["train"][str(best["train"]._replace(compiled=True))] == "not compiled in 1 s"
    assert tried["sample"][str(best["sample"]._replace(compiled=True))] == 9.0
    assert any("static cache" in name for name in tried["sample"])


def test_what_compiles_faster_is_compiled(tries):
    best, _ = tries({"train": 0.5, "sample": "failed: RuntimeError: no"})
    assert best["train"].compiled
    assert not best["sample"].compiled


def test_compiling_that_is_not_asked_for_is_not_tried(tries):
    best, tried = tries({}, compile_s=0.0)
    assert not any(options.compiled for options in best.values())
    assert not any("compile" in name for times in tried.values() for name in times)
